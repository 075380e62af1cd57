"""What rounds of engines say: medians by engine, ratios by round, and how far a decode step is from its floor."""

import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxserve.bench.measure import paired_ratios, spread
from jaxserve.bench.peers.rounds import Contestant, Work
from jaxserve.bench.report import Figure, Grid, Report, short_number

BUSY_SHARE = 0.02  # of a core: more than reading a pipe and waking up takes
MIB = 2**20
QUIET_CORES = 0.1


@dataclass(frozen=True, kw_only=True)
class Measurements:
    """The outcome of all rounds. The first engine is ours. bandwidth: bytes/s, one reading a round. foreign_cores: kept
    busy by processes outside the run, None where not known."""

    path: Path
    work: list[Work]
    engines: list[Contestant]
    bandwidth: list[float]
    bytes_per_step: int
    foreign_cores: float | None

    @property
    def measured(self) -> list[Contestant]:
        """Those with figures, ours first."""
        return [engine for engine in self.engines if engine.reason is None]

    @property
    def floor_steps_per_second(self) -> float:
        """Decode steps that memory allows: the median bandwidth over the bytes of one step."""
        return statistics.median(self.bandwidth) / self.bytes_per_step


def peers_report(found: Measurements, settings: dict[str, Any], notes: tuple[str, ...] = ()) -> Report:
    """The report: tokens/s and engines as grids, ratios and the floor as figures, single rounds as samples."""
    return Report(
        title="peers",
        model={"file": found.path.name, "bytes": found.path.stat().st_size},
        settings=settings,
        grids=(_rates(found), _engines(found)),
        figures=(*_ratios(found), *_floor(found)),
        notes=(*_notes(found), *notes),
        samples={
            "tokens_per_second": {engine.name: engine.rates for engine in found.measured},
            "foreign_cores": found.foreign_cores,
            "read_bytes_per_second": found.bandwidth,
            "engines": {engine.name: _details(engine) for engine in found.engines},
        },
    )


def _rates(found: Measurements) -> Grid:
    """Median tokens/s: work down, engines across."""
    names = tuple(engine.name for engine in found.measured)
    rows = [
        (work.name, *(short_number(statistics.median(engine.rates[work.name])) for engine in found.measured))
        for work in found.work
    ]
    return Grid(headings=("median tokens/s", *names), rows=tuple(rows))


def _engines(found: Measurements) -> Grid:
    headings = ("engine", "version", "loaded", "resident after load", "at the end", "peak", "idle CPU", "state")
    return Grid(headings=headings, rows=tuple(map(_engine_row, found.engines)))


def _engine_row(engine: Contestant) -> tuple[str, ...]:
    if engine.reason is not None:
        return engine.name, str(engine.facts.get("version", "")), "", "", "", "", "", engine.reason
    share = engine.idle_share
    others = ", ".join(f"{k} {v}" for k, v in engine.facts.items() if k not in ("version", "vocab_size"))
    return (
        engine.name,
        str(engine.facts["version"]),
        f"{engine.load_seconds:.1f} s",
        _megabytes(engine.loaded_bytes, "now"),
        _megabytes(engine.final_bytes, "now"),
        _megabytes(engine.final_bytes, "peak"),
        "not known" if share is None else f"{100 * share:.1f} %",
        others,
    )


def _megabytes(sizes: dict[str, int], key: str) -> str:
    return f"{sizes[key] / MIB:,.0f} MiB" if key in sizes else "not known"


def _ratios(found: Measurements) -> tuple[Figure, ...]:
    own, *peers = found.measured
    return tuple(
        Figure(
            name=f"{work.name}: {own.name} over {peer.name}",
            unit="x",
            value=spread(paired_ratios(own.rates[work.name], peer.rates[work.name])),
        )
        for peer in peers
        for work in found.work
    )


def _floor(found: Measurements) -> tuple[Figure, ...]:
    """Bandwidth, the shortest decode step it allows, and how much of that rate one sequence gets."""
    single = next((work for work in found.work if work.num_seqs == 1 and work.num_tokens > 1), None)
    milliseconds = [1e3 * found.bytes_per_step / value for value in found.bandwidth]
    figures = [
        Figure(name="read bandwidth", unit="GB/s", value=spread([value / 1e9 for value in found.bandwidth])),
        Figure(name="shortest decode step it allows", unit="ms", value=spread(milliseconds)),
    ]
    for engine in found.measured:
        if single is None:
            break
        shares = [rate / found.floor_steps_per_second for rate in engine.rates[single.name]]
        figures.append(Figure(name=f"{single.name} over that bound: {engine.name}", unit="x", value=spread(shares)))
    return tuple(figures)


def _notes(found: Measurements) -> list[str]:
    notes = [
        "decode: tokens after the first of every sequence; prefill: prompt tokens over the time to the first token",
        "ratios are taken round by round, prompts are equal token ids, and jaxserve's prefix cache is off",
        f"a decode step reads {found.bytes_per_step:,} bytes of weights, each once",
    ]
    busy = [engine for engine in found.measured if (engine.idle_share or 0) > BUSY_SHARE]
    notes += [
        f"{engine.name} kept {engine.idle_share:.2f} cores busy while others had their turn: its peers' figures suffer"
        for engine in busy
    ]
    if found.foreign_cores is not None and found.foreign_cores > QUIET_CORES:
        notes.append(
            f"other processes kept {found.foreign_cores:.2f} cores busy: these figures are not to be trusted, least of "
            "all those of engines whose threads spin while they wait for each other"
        )
    return notes


def _details(engine: Contestant) -> dict[str, Any]:
    if engine.reason is not None:
        return {"reason": engine.reason, "command": engine.command.command[0]}
    return {
        "facts": engine.facts,
        "load_seconds": engine.load_seconds,
        "resident_bytes_after_load": engine.loaded_bytes,
        "resident_bytes_at_end": engine.final_bytes,
        "idle_cpu_share": engine.idle_share,
    }
