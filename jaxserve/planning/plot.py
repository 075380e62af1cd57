"""A picture of plans: for each a stack of what fills a device's memory, and stacks of what its steps' time goes to."""

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxserve.errors import ConfigError

MEMORY = ("weights", "kv_cache", "state", "inputs", "padding", "temp", "output")
TIME = ("memory", "compute", "wire")
GIB = 2**30


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
    """Writes a PNG: a bar for each plan with GiB per device, and one for each program with milliseconds by resource."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # pyright: ignore[reportMissingImports]
    from matplotlib.figure import Figure  # pyright: ignore[reportMissingImports]

    figure = Figure(figsize=(5 + 2.2 * len(reports), 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    names = [f"tp {report['plan']['tensor']}\nep {report['plan']['expert']}" for report in reports]
    stacks = {part: [report["per_device"][f"{part}_bytes"] / GIB for report in reports] for part in MEMORY}
    _stack(left, names, stacks)
    left.axhline(reports[0]["per_device"]["capacity_bytes"] / GIB, color="black", linestyle="--", label="capacity")
    left.set(ylabel="GiB per device", title="memory")
    left.legend(fontsize="small")
    steps = [(name, report[name]) for report in reports for name in ("prefill", "decode")]
    labels = [f"{label}\n{name}" for label in names for name in ("prefill", "decode")]
    _stack(right, labels, {part: [1000 * step[f"{part}_seconds"] for _, step in steps] for part in TIME})
    right.set(ylabel="ms per step", title="reading, computing (overlapped at best), sending", yscale="symlog")
    right.legend(fontsize="small")
    figure.suptitle(f"{Path(reports[0]['model']).stem} on {reports[0]['topology']}", fontsize="medium")
    figure.savefig(path, dpi=120)


def _stack(axes: Any, names: Sequence[str], stacks: dict[str, list[float]]) -> None:
    positions, bottom = range(len(names)), [0.0] * len(names)
    for part, values in stacks.items():
        axes.bar(positions, values, 0.6, bottom=bottom, label=part.replace("_", " "))
        bottom = [below + value for below, value in zip(bottom, values, strict=True)]
    axes.set_xticks(positions, names, fontsize="small")
