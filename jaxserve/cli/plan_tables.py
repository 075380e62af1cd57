"""What `jaxserve plan` prints for people: one plan's figures, and a ranking of many."""

import sys
from collections.abc import Sequence
from typing import Any

from jaxserve.cli.terminal import visible_line

PIPE_WIDTH = 140
GIB = 2**30
SHOWN_BYTES = GIB // 2000  # what is shown as 0.001
MEMORY_ROWS = (
    ("weights", "weights_bytes"), ("KV cache", "kv_cache_bytes"), ("state", "state_bytes"), ("inputs", "inputs_bytes"),
    ("layout padding", "padding_bytes"), ("temporary", "temp_bytes"), ("output", "output_bytes"),
    ("total", "total_bytes"), ("capacity (90% of memory)", "capacity_bytes"),
)  # fmt: skip


def print_plan(report: dict[str, Any]) -> None:
    """All figures of one plan."""
    console = _console()
    console.print(visible_line(_headline(report)))
    for line in _problems(report):
        console.print(visible_line(line))
    memory = report["per_device"]
    rows = [(name, _gib(memory[key])) for name, key in MEMORY_ROWS if memory[key] >= SHOWN_BYTES or not _is_small(key)]
    console.print(_table(("per device", "GiB"), rows))
    console.print(_table(("", "prefill", "decode"), _step_rows(report)))
    sent = [
        (each["program"], each["kind"], f"{each['num_devices']}{' over hosts' if each['crosses_hosts'] else ''}",
         f"{each['count']:,}", f"{each['bytes'] / 2**20:,.1f}", _milliseconds(each["seconds"]))
        for each in report["collectives"]
    ]  # fmt: skip
    if sent:
        console.print(_table(("sent by", "collective", "devices", "times", "MiB", "ms"), sent))
    for line in _summary(report):
        console.print(visible_line(line))
    console.print()


def print_plans(reports: Sequence[dict[str, Any]]) -> None:
    """One line a plan, best first."""
    headings = (
        "plan",
        "figures",
        "fits",
        "weights GiB",
        "total GiB",
        "KV tokens",
        "decode ms",
        "tokens/s",
        "TTFT ms",
        "bound by",
    )
    rows = []
    for report in reports:
        memory, decode = report["per_device"], report["decode"]
        rows.append(
            (_plan(report), "compiled" if report["is_compiled"] else "estimated", _fits(report),
             _gib(memory["weights_bytes"]), _gib(memory["total_bytes"]), f"{report['kv_capacity_tokens']:,}",
             _milliseconds(decode["seconds"]), f"{decode['tokens_per_second']:,.0f}",
             _milliseconds(report["ttft_seconds"]), decode["bound_by"])
        )  # fmt: skip
    _console().print(_table(headings, rows, left=("plan", "figures", "fits", "bound by")))


def _headline(report: dict[str, Any]) -> str:
    used = report["num_devices_used"]
    devices = f"{used} of {report['num_devices']}" if used != report["num_devices"] else f"{used}"
    where = f"{report['topology']} ({devices} x {report['device']})"
    size = f"{report['num_parameters'] / 1e9:,.1f}B parameters"
    load = f"{report['batch']} sequences of {report['context']:,} tokens"
    return f"{report['model']}, {size}, on {where}, {_plan(report)}: {load}"


def _problems(report: dict[str, Any]) -> list[str]:
    lines = [] if report["fits"] else ["IT DOES NOT FIT" if report["failure"] is None else "IT DOES NOT COMPILE"]
    said = dict.fromkeys(report[key] for key in ("failure", "refusal") if report[key])
    lines += [f"compiler: {what}" for what in said]
    if report["advice"]:
        lines.append(f"what would fit: {report['advice']}")
    return lines + [f"warning: {each['message']}" for each in report["warnings"]]


def _step_rows(report: dict[str, Any]) -> list[tuple[str, ...]]:
    steps = [report["prefill"], report["decode"]]
    forms = (
        ("step", lambda s: s["program"]),
        ("TFLOP", lambda s: f"{s['flops'] / 1e12:,.3f}"),
        ("GB from memory", lambda s: f"{s['hbm_bytes'] / 1e9:,.2f}"),
        ("MB sent", lambda s: f"{s['wire_bytes'] / 1e6:,.1f}"),
        ("ms computing", lambda s: _milliseconds(s["compute_seconds"])),
        ("ms reading", lambda s: _milliseconds(s["memory_seconds"])),
        ("ms sending", lambda s: _milliseconds(s["wire_seconds"])),
        ("ms in all", lambda s: _milliseconds(s["seconds"])),
        ("bound by", lambda s: s["bound_by"]),
        ("tokens/s", lambda s: f"{s['tokens_per_second']:,.0f}"),
    )
    return [(name, *(form(step) for step in steps)) for name, form in forms]


def _summary(report: dict[str, Any]) -> list[str]:
    lines = [
        f"room for {report['kv_capacity_tokens']:,} tokens of cache, {report['kv_bytes_per_token'] / 1024:,.1f} KiB of "
        "each on every device",
        f"first token of a prompt of {report['context']:,} after {report['ttft_seconds']:.3f} s at best",
    ]
    cost = report["cost_per_million_tokens"]
    if cost["input"] is not None:
        price = f"{report['price_per_chip_hour']:g} per chip and hour"
        lines.append(f"a million tokens at {price}: in {cost['input']:.3f}, out {cost['output']:.3f}")
    if report["is_compiled"]:
        memory = report["host_memory_bytes"] / GIB
        lines.append(f"compiled in {report['compile_seconds']:.1f} s with {memory:.1f} GiB of this machine's memory")
    else:
        lines.append("not compiled: temporary bytes, FLOPs and collectives are estimates")
    return [*lines, "times are the least that the device's public figures allow (a roofline), not a measurement"]


def _plan(report: dict[str, Any]) -> str:
    return " x ".join(f"{axis} {size}" for axis, size in report["plan"].items() if axis != "data" or size > 1)


def _fits(report: dict[str, Any]) -> str:
    if report["failure"]:
        return "failed"
    return "yes" if report["fits"] else "no"


def _is_small(key: str) -> bool:
    return key in ("state_bytes", "inputs_bytes", "padding_bytes", "output_bytes")


def _gib(size: int) -> str:
    return f"{size / GIB:,.3f}"


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:,.2f}"


def _console() -> Any:
    from rich.console import Console

    return Console(highlight=False, markup=False, emoji=False, width=None if sys.stdout.isatty() else PIPE_WIDTH)


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]], *, left: Sequence[str] = ()) -> Any:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False)
    for number, heading in enumerate(headings):
        table.add_column(heading, justify="left" if number == 0 or heading in left else "right", overflow="fold")
    for row in rows:
        table.add_row(*(Text(visible_line(cell)) for cell in row))
    return table
