"""`jaxserve inspect`: what a model file holds, without loading it."""

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from jaxserve.cli.options import CACHE_DIR_HELP, MODEL_HELP, model_cache
from jaxserve.cli.terminal import print_json, visible_line

PIPE_WIDTH = 160  # of a table that is not for a terminal


def inspect(
    model: Annotated[str, typer.Argument(help=MODEL_HELP)],
    json_: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    tensors: Annotated[bool, typer.Option("--tensors", help="List every tensor.")] = False,
    cache_dir: Annotated[Path | None, typer.Option(help=CACHE_DIR_HELP)] = None,
) -> None:
    """Show architecture, sizes, formats, tokenizer and chat template of a model."""
    from checkpoints.hub import resolve
    from checkpoints.inspect import describe

    description = describe(resolve(model, cache_dir=model_cache(cache_dir)))
    content = description.as_dict()
    if not tensors:
        content.pop("tensors")
    if json_:
        print_json(content | {"num_tensors": len(description.tensors)})
    else:
        _print_tables(content | {"num_tensors": len(description.tensors)})


def _print_tables(content: dict[str, Any]) -> None:
    from rich.console import Console

    width = None if sys.stdout.isatty() else PIPE_WIDTH
    console = Console(highlight=False, markup=False, emoji=False, width=width)
    console.print(_table(("", ""), facts(content), right=()))
    if "tensors" in content:
        rows = [
            (t["name"], " x ".join(map(str, t["shape"])), t["format"], f"{t['num_bytes']:,}")
            for t in content["tensors"]
        ]
        console.print(_table(("tensor", "shape", "format", "bytes"), rows, right=("bytes",)))


def facts(content: dict[str, Any]) -> list[tuple[str, str]]:
    """Name and value of what the file says, in the order a person asks; what it does not say is left out."""
    rows = [(label, content[key]) for label, key in FACTS]
    shown = [(label, f"{value:,}" if isinstance(value, int) else str(value)) for label, value in rows if value]
    for name, num_bytes in content["bytes_by_format"].items():
        shown.append((f"format {name}", f"{num_bytes:,} bytes"))
    tokenizer = content["tokenizer"]
    if tokenizer:
        size = "" if tokenizer["vocab_size"] is None else f", {tokenizer['vocab_size']:,} tokens"
        pre = f", pre-tokenizer {tokenizer['pre']}" if tokenizer["pre"] else ""
        shown.append(("tokenizer", f"{tokenizer['kind']}{size}{pre}"))
    shown += _generation_facts(content)
    head = " ".join(content["chat_template_head"])
    shown.append(("chat template", f"{head[:160]} ..." if content["has_chat_template"] else "none"))
    return shown


def _generation_facts(content: dict[str, Any]) -> list[tuple[str, str]]:
    """What generation_config.json says of sampling, and of the ids that end a generation."""
    rows = []
    if content["sampling_defaults"]:
        values = (f"{name} {value}" for name, value in content["sampling_defaults"].items())
        rows.append(("sampling defaults", ", ".join(values)))
    if content["eos_token_ids"]:
        rows.append(("ends at tokens", ", ".join(map(str, content["eos_token_ids"]))))
    return rows


FACTS = (
    ("path", "path"),
    ("container", "container"),
    ("architecture", "architecture"),
    ("name", "name"),
    ("parameters", "num_parameters"),
    ("bytes", "num_bytes"),
    ("tensors", "num_tensors"),
    ("context length", "context_length"),
    ("layers", "num_layers"),
    ("hidden size", "hidden_size"),
    ("ffn size", "ffn_size"),
    ("heads", "num_heads"),
    ("kv heads", "num_kv_heads"),
    ("head size", "head_size"),
    ("vocabulary", "vocab_size"),
    ("experts", "num_experts"),
)


def _table(headings: tuple[str, ...], rows: list[tuple[str, ...]], *, right: tuple[str, ...]) -> Any:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, show_header=any(headings))
    for heading in headings:
        table.add_column(heading, justify="right" if heading in right else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(visible_line(cell)) for cell in row))  # Text: brackets in a file are no markup
    return table
