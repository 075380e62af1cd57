"""`jaxserve plan`: whether a model fits devices that are not there, how fast it would run, and what it would cost."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jaxserve.cli.options import CACHE_DIR_HELP, model_cache
from jaxserve.cli.terminal import note, print_json
from jaxserve.cli.values import human_number
from jaxserve.errors import ConfigError

if TYPE_CHECKING:
    from jaxserve.planning.described_model import DescribedModel
    from jaxserve.planning.request import PlanRequest
    from sharding.topology import Topology

DEFAULT_CONTEXT = 4096
SIZES = ("tensor", "expert", "data")

MODEL_HELP = "A folder, a .gguf file, a config.json alone, a catalog name, or hf:ORG/REPO."
TOPOLOGY_HELP = "Devices: v5e:4x4, v5p:4x4x8, v6e:16x16, tpu7x:2x2x1, h200:8, h200:2x8 (nodes x GPUs), b200:8, cpu:8."


def plan(
    model: Annotated[str, typer.Argument(help=MODEL_HELP)],
    topology: Annotated[str, typer.Option(help=TOPOLOGY_HELP)],
    plan_: Annotated[
        str | None,
        typer.Option("--plan", help="A TOML file with a table [mesh], or tensor, expert, data: all devices along it."),
    ] = None,
    tensor: Annotated[
        int | None, typer.Option("--tensor-parallel-size", "-tp", help="Devices that share heads, widths, vocabulary.")
    ] = None,
    expert: Annotated[
        int | None, typer.Option("--expert-parallel-size", "-ep", help="Devices that experts are dealt out to.")
    ] = None,
    data: Annotated[
        int | None, typer.Option("--data-parallel-size", "-dp", help="Groups of devices with requests of their own.")
    ] = None,
    search: Annotated[bool, typer.Option("--search", help="Rank all plans, compile the best --top of them.")] = False,
    top: Annotated[int, typer.Option(min=1, help="Plans that --search compiles.")] = 3,
    context: Annotated[
        int | None,
        typer.Option(parser=human_number, metavar="NUMBER", help="Tokens of a sequence; default: 4K, or the model's."),
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Sequences at once.")] = 32,
    price: Annotated[float | None, typer.Option(min=0.0, help="Of a chip or GPU, per hour.")] = None,
    weights: Annotated[
        str | None, typer.Option(help="Format of matrices (bf16, q8_0, ...); default: the file's.")
    ] = None,
    kv_cache_dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or int8.")] = "auto",
    page_size: Annotated[int, typer.Option(min=1, help="Tokens per KV page.")] = 16,
    max_num_batched_tokens: Annotated[
        int | None, typer.Option(parser=human_number, metavar="NUMBER", help="Tokens of a prefill step.")
    ] = None,
    time_limit: Annotated[float, typer.Option(min=1.0, help="Seconds that compiling one plan may take.")] = 120.0,
    json_: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a PNG: memory and time per plan.")] = None,
    cache_dir: Annotated[Path | None, typer.Option(help=CACHE_DIR_HELP)] = None,
) -> None:
    """Compile the engine's programs for devices that are not there: what fits, what moves, tokens/s, cost."""
    _check_choices(plan_, tensor or expert or data, search)
    from checkpoints.hub import resolve
    from jaxserve.planning.described_model import describe_model
    from jaxserve.planning.plot import check_plotting
    from jaxserve.planning.request import PlanRequest

    if plot is not None:
        check_plotting(plot)
    where = _topology(topology)
    described = describe_model(path := resolve(model, cache_dir=model_cache(cache_dir)), weights)
    mesh = _mesh(plan_, where.num_devices, tensor, expert, data)
    request = PlanRequest(
        model=str(path), topology=str(where), **(mesh or {"tensor": 1, "expert": 1}),
        context=context or min(DEFAULT_CONTEXT, described.config.max_position), batch=batch,
        num_tokens=max_num_batched_tokens, weights=weights, kv_cache_dtype=kv_cache_dtype, page_size=page_size,
    )  # fmt: skip
    request.check()
    request.check_model(described.config)
    reports = _reports(request, described, top if search else 1, time_limit, price, is_chosen=mesh is not None)
    _show(reports, json_, plot, has_many=search)


def _check_choices(plan: str | None, size: int | None, search: bool) -> None:
    if plan is not None and size:
        raise ConfigError(f"--plan {plan} states the sizes of the mesh: leave the parallel sizes out")
    if search and (plan or size):
        raise ConfigError("--search tries every plan: leave --plan and the parallel sizes out")


def _mesh(
    plan: str | None, num_devices: int, tensor: int | None, expert: int | None, data: int | None
) -> dict[str, Any] | None:
    """The plan that was named, in fields of a request; None where none was."""
    if plan is None:
        named = (tensor, expert, data)
        return None if named == (None, None, None) else dict(zip(SIZES, (size or 1 for size in named), strict=True))
    from sharding.plan import named_plan

    try:
        return vars(named_plan(plan, num_devices))
    except (OSError, ValueError) as error:
        raise ConfigError(f"--plan {plan}: {error}") from error


def _topology(name: str) -> "Topology":
    from sharding.topology import check_compiler, read_topology

    try:
        found = read_topology(name)
    except ValueError as error:
        raise ConfigError(f"--topology {error}") from error
    check_compiler(found)
    return found


def _reports(
    request: "PlanRequest",
    described: "DescribedModel",
    num_compiled: int,
    time_limit: float,
    price: float | None,
    *,
    is_chosen: bool,
) -> list[dict[str, Any]]:
    """Reports of the plan that was named, or of all in the order of their estimates, the first of them compiled."""
    from jaxserve.planning.plans import compile_plan
    from jaxserve.planning.report import plan_report, planned
    from jaxserve.planning.search import ranked_plans

    try:
        plans = [planned(request, described)] if is_chosen else ranked_plans(request, described)
    except ValueError as error:
        raise ConfigError(f"{request.plan}: {error}") from error
    reports = []
    for number, each in enumerate(plans):
        is_compiled = number < num_compiled
        if is_compiled:
            note(f"compiling {each.request.plan} for {request.where} ...")
        facts = compile_plan(each.request, os.environ, time_limit) if is_compiled else {}
        reports.append(plan_report(each, facts, price))
    return reports


def _show(reports: list[dict[str, Any]], as_json: bool, plot: Path | None, *, has_many: bool) -> None:
    from jaxserve.cli.plan_tables import print_plan, print_plans
    from jaxserve.planning.plot import write_plot

    compiled = [report for report in reports if _was_tried(report)]
    if plot is not None:
        write_plot(compiled, plot)
        note(f"wrote {plot}")
    if as_json:
        print_json({**_best(compiled), "plans": reports} if has_many else reports[0])
        return
    for report in compiled:
        print_plan(report)
    if has_many:
        print_plans(reports)


def _best(compiled: list[dict[str, Any]]) -> dict[str, Any]:
    """The plan that fits and decodes fastest as compiled; the first where none fits."""
    return max(compiled, key=lambda report: report["decode"]["tokens_per_second"] if report["fits"] else 0.0)


def _was_tried(report: dict[str, Any]) -> bool:
    return any((report["is_compiled"], report["failure"], report["refusal"]))
