"""`jaxserve convert`: a model as a native checkpoint, which any number of devices can read in parts."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from jaxserve.cli.options import CACHE_DIR_HELP, MODEL_HELP, model_cache
from jaxserve.cli.terminal import print_json, visible_line
from jaxserve.errors import ConfigError

if TYPE_CHECKING:
    from sharding.plan import ShardingPlan

FORMAT_HELP = "Format of all matrices: bf16, f16, f32, or one of GGUF's (q4_0, q6_k, ...); default: as they are."


def convert(
    source: Annotated[str, typer.Argument(metavar="SRC", help=MODEL_HELP)],
    target: Annotated[Path, typer.Argument(metavar="DST", help="The folder to make.")],
    format_: Annotated[str | None, typer.Option("--format", metavar="FORMAT", help=FORMAT_HELP)] = None,
    plan: Annotated[
        Path | None, typer.Option(metavar="PLAN", help="Plan (TOML) whose devices will read DST; others can as well.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a native checkpoint at DST.")] = False,
    json_: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    cache_dir: Annotated[Path | None, typer.Option(help=CACHE_DIR_HELP)] = None,
) -> None:
    """Write a model as a native checkpoint. DST appears when it is complete."""
    from checkpoints.errors import CheckpointError
    from checkpoints.hub import resolve
    from checkpoints.native_writing import check_target
    from jaxserve.cli.bars import Bars
    from jaxserve.engine.conversion import convert as convert_model

    format_name, cut_by = known_format(format_), plan_in(plan)
    check_target(target.expanduser(), overwrite=overwrite)  # before anything is fetched
    path = resolve(source, cache_dir=model_cache(cache_dir))
    bars = Bars()
    try:
        done = convert_model(path, target.expanduser(), format_name, bars, overwrite=overwrite, plan=cut_by)
    except CheckpointError:
        raise
    except ValueError as error:
        raise ConfigError(f"--plan {plan}: {error}") from error
    if done.kept:
        bars.note(f"{len(done.kept)} matrices stayed as they were, their rows are not whole {format_name} blocks")
    if json_:
        kept = list(done.kept)
        sizes = {"num_bytes": done.num_bytes, "bytes_by_format": dict(done.bytes_by_format)}
        print_json({"path": str(done.path), **sizes, "kept": kept})
    else:
        formats = ", ".join(f"{name} {num_bytes:,}" for name, num_bytes in done.bytes_by_format.items())
        print(visible_line(f"{done.path}  {done.num_bytes:,} bytes  {formats}"))


def known_format(name: str | None) -> str | None:
    """The format's name as files write it. Raises ConfigError for one this version has no encoder of."""
    from jaxserve.quant.formats import FORMATS

    if name is None or name.upper() in FORMATS:
        return name and name.upper()
    raise ConfigError(f"--format {name}: expected one of {', '.join(FORMATS).lower()}")


def plan_in(path: Path | None) -> "ShardingPlan | None":
    """The plan of a file; ConfigError for one that is none."""
    from sharding.plan import read_plan

    if path is None:
        return None
    try:
        return read_plan(path.expanduser())
    except (OSError, ValueError) as error:
        raise ConfigError(f"--plan {path}: {error}") from error
