"""A picture of plans: for each a stack of what fills a device's memory, and stacks of what its steps' time goes to."""

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxserve.errors import ConfigError

MEMORY = ("weights", "kv_cache", "state", "inputs", "padding", "temp", "output")
GIB = 2**30
LEAST_SHARE = 0.005  # of the capacity; what takes less is not drawn


def is_there() -> bool:
    """Whether pictures can be drawn."""
    return importlib.util.find_spec("matplotlib") is not None


def check_plotting(path: Path) -> None:
    """Raises ConfigError where no picture can be drawn there, before anything is compiled."""
    if not is_there():
        raise ConfigError("--plot needs matplotlib: pip install 'jaxserve[plot]'")
    if path.suffix.lower() != ".png":
        raise ConfigError(f"--plot {path}: expected a file name that ends in .png")
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"--plot {path}: there is no folder {path.absolute().parent}")


def write_plot(reports: Sequence[dict[str, Any]], path: Path) -> None:
    """Writes a PNG with a bar for each plan: what fills a device's memory, and where the time of each program goes."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # pyright: ignore[reportMissingImports]
    from matplotlib.figure import Figure  # pyright: ignore[reportMissingImports]

    figure = Figure(figsize=(9 + 2.4 * len(reports), 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    memory, *times = figure.subplots(1, 3)
    names = ["tp {tensor}\nep {expert}\ndp {data}".format(**report["plan"]) for report in reports]
    capacity = reports[0]["per_device"]["capacity_bytes"]
    stacks = {part: [report["per_device"][f"{part}_bytes"] for report in reports] for part in MEMORY}
    drawn = {part: sizes for part, sizes in stacks.items() if max(sizes) >= LEAST_SHARE * capacity}
    memory.axhline(capacity / GIB, color="black", linestyle="--", label="capacity")
    _stack(memory, names, {part: [size / GIB for size in sizes] for part, sizes in drawn.items()})
    memory.set(ylabel="GiB per device", title="memory")
    for axes, name in zip(times, ("prefill", "decode"), strict=True):
        _stack(axes, names, _milliseconds([report[name] for report in reports]))
        axes.set(ylabel="ms per step", title=name)
    for axes in (memory, *times):
        axes.legend(fontsize="small", loc="upper left", bbox_to_anchor=(1, 1))
    figure.suptitle(f"{Path(reports[0]['model']).stem} on {reports[0]['topology']}", fontsize="medium")
    figure.savefig(path, dpi=120)


def _milliseconds(steps: Sequence[dict[str, Any]]) -> dict[str, list[float]]:
    """What a step waits for: the longer of reading and computing, which overlap, and sending."""

    def longer(step: dict[str, Any], part: str, other: str) -> float:
        return 1000 * step[f"{part}_seconds"] * (step[f"{part}_seconds"] >= step[f"{other}_seconds"])

    return {
        "reading": [longer(step, "memory", "compute") for step in steps],
        "computing": [longer(step, "compute", "memory") for step in steps],
        "sending": [1000 * step["wire_seconds"] for step in steps],
    }


def _stack(axes: Any, names: Sequence[str], stacks: dict[str, list[float]]) -> None:
    positions, bottom = range(len(names)), [0.0] * len(names)
    for part, values in stacks.items():
        axes.bar(positions, values, 0.6, bottom=bottom, label=part.replace("_", " "))
        bottom = [below + value for below, value in zip(bottom, values, strict=True)]
    axes.set_xticks(positions, names, fontsize="small")
