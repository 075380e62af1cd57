"""`jaxserve pull`: makes sure that a model is on this disk and sound."""

from pathlib import Path
from typing import Annotated

import typer

from checkpoints.catalog import CATALOG, DEFAULT_MODEL
from checkpoints.hub import PulledModel
from checkpoints.hub import pull as pull_model
from jaxserve.cli.options import CACHE_DIR_HELP, MODEL_HELP, model_cache
from jaxserve.cli.terminal import print_json, visible_line


def pull(
    model: Annotated[str, typer.Argument(help=MODEL_HELP)] = DEFAULT_MODEL,
    list_: Annotated[bool, typer.Option("--list", help="Show the catalog and fetch nothing.")] = False,
    json_: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    cache_dir: Annotated[Path | None, typer.Option(help=CACHE_DIR_HELP)] = None,
) -> None:
    """Fetch a model, check its digest, and say where it is."""
    if list_:
        _show_catalog(json_)
        return
    pulled = pull_model(model, cache_dir=model_cache(cache_dir))
    if json_:
        print_json({"model": model, **as_dict(pulled)})
    else:
        print(visible_line(one_line(pulled)))


def one_line(pulled: PulledModel) -> str:
    """Path, bytes, digest, and whether anything had to be fetched."""
    parts = [str(pulled.path), f"{pulled.num_bytes:,} bytes"]
    if pulled.sha256:
        parts.append(f"sha256 {pulled.sha256}")
    return "  ".join([*parts, "cached" if pulled.was_cached else "fetched"])


def as_dict(pulled: PulledModel) -> dict[str, object]:
    """The same for programs."""
    return {
        "path": str(pulled.path),
        "num_bytes": pulled.num_bytes,
        "sha256": pulled.sha256,
        "was_cached": pulled.was_cached,
    }


def _show_catalog(as_json: bool) -> None:
    if as_json:
        print_json(
            [
                {"name": e.name, "num_bytes": e.num_bytes, "sha256": e.sha256, "summary": e.summary}
                for e in CATALOG.values()
            ]
        )
        return
    for entry in CATALOG.values():
        default = " (default)" if entry.name == DEFAULT_MODEL else ""
        print(f"{entry.name}{default}  {entry.num_bytes:,} bytes  {entry.summary}")
