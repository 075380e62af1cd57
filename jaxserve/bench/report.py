"""A benchmark's result: figures with units and targets, where they come from, as a table or as JSON."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from jaxserve.bench.machine import machine_facts
from jaxserve.bench.measure import Percentiles, Spread


@dataclass(frozen=True, kw_only=True)
class Target:
    """What a figure's median is held to."""

    limit: float
    is_floor: bool

    def is_met(self, value: float) -> bool:
        """Whether the value is on the right side; the limit itself is."""
        return value >= self.limit if self.is_floor else value <= self.limit

    def __str__(self) -> str:
        return f"{'≥' if self.is_floor else '≤'} {self.limit:g}"


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One number over the rounds. unit "x" is a ratio."""

    name: str
    unit: str
    value: Spread
    target: Target | None = None

    def as_dict(self) -> dict[str, Any]:
        """For JSON; a target carries whether the median meets it."""
        content: dict[str, Any] = {"name": self.name, "unit": self.unit, **asdict(self.value)}
        if self.target is not None:
            content["target"] = {"text": str(self.target), "met": self.target.is_met(self.value.median)}
        return content


@dataclass(frozen=True, kw_only=True)
class Distribution:
    """One number per request, token or step. A target holds for the median."""

    name: str
    unit: str
    value: Percentiles
    target: Target | None = None

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        content: dict[str, Any] = {"name": self.name, "unit": self.unit, **asdict(self.value)}
        if self.target is not None:
            content["target"] = {"text": str(self.target), "met": self.target.is_met(self.value.p50)}
        return content


@dataclass(frozen=True, kw_only=True)
class Grid:
    """A table of words beside the figures. The first column names its rows."""

    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def as_dict(self) -> dict[str, Any]:
        """For JSON: one object a row."""
        return {"rows": [dict(zip(self.headings, row, strict=True)) for row in self.rows]}


@dataclass(frozen=True, kw_only=True)
class Report:
    """The result of one benchmark. notes: what a reader must know to read the figures right. samples: single
    measurements, which only JSON shows."""

    title: str
    settings: Mapping[str, Any]
    model: Mapping[str, Any] = field(default_factory=dict)
    machine: Mapping[str, Any] = field(default_factory=machine_facts)
    figures: tuple[Figure, ...] = ()
    distributions: tuple[Distribution, ...] = ()
    grids: tuple[Grid, ...] = ()
    notes: tuple[str, ...] = ()
    samples: Mapping[str, Any] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "title": self.title,
            "settings": dict(self.settings),
            "model": dict(self.model),
            "machine": dict(self.machine),
            "figures": [figure.as_dict() for figure in self.figures],
            "distributions": [distribution.as_dict() for distribution in self.distributions],
            "notes": list(self.notes),
            **({"grids": [grid.as_dict() for grid in self.grids]} if self.grids else {}),
            **({"samples": dict(self.samples)} if self.samples else {}),
        }


def printable(report: Report) -> list[Any]:
    """The report as things rich prints, in order."""
    from rich.text import Text

    parts: list[Any] = [Text(report.title, style="bold")]
    for facts in (report.machine, report.model, report.settings):
        if facts:
            parts.append(Text(" | ".join(f"{name} {_plain(value)}" for name, value in facts.items())))
    parts += [_grid_table(grid) for grid in report.grids]
    if report.figures:
        parts.append(_figure_table(report.figures))
    if report.distributions:
        parts.append(_distribution_table(report.distributions))
    return [*parts, *(Text(f"note: {note}") for note in report.notes)]


def _figure_table(figures: tuple[Figure, ...]) -> Any:
    rows = []
    for f in figures:
        v = f.value
        rows.append(
            (f.name, f.unit, *map(short_number, (v.median, v.min, v.max)), f"{v.count:,}", _verdict(f.target, v.median))
        )
    return _table(("figure", "unit", "median", "min", "max", "rounds", "target"), rows)


def _distribution_table(distributions: tuple[Distribution, ...]) -> Any:
    rows = []
    for d in distributions:
        v = d.value
        numbers = tuple(map(short_number, (v.mean, v.p50, v.p90, v.p95, v.p99, v.max)))
        rows.append((d.name, d.unit, *numbers, f"{v.count:,}", _verdict(d.target, v.p50)))
    return _table(("distribution", "unit", "mean", "p50", "p90", "p95", "p99", "max", "count", "target"), rows)


def _grid_table(grid: Grid) -> Any:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False)
    for heading in grid.headings:
        table.add_column(heading)
    for row in grid.rows:
        table.add_row(*map(Text, row))
    return table


def _table(headings: tuple[str, ...], rows: list[tuple[str, ...]]) -> Any:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False)
    has_target = any(row[-1] for row in rows)
    last = len(headings) if has_target else len(headings) - 1
    for position, heading in enumerate(headings[:last]):
        is_number = position >= 2 and heading != "target"
        table.add_column(heading, justify="right" if is_number else "left", no_wrap=position > 0)
    for row in rows:
        table.add_row(*map(Text, row[:last]))
    return table


def _verdict(target: Target | None, value: float) -> str:
    if target is None:
        return ""
    return f"{target} {'met' if target.is_met(value) else 'NOT met'}"


def short_number(value: float) -> str:
    """Four significant digits, or all of a whole part."""
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def _plain(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
