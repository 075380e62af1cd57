"""`jaxserve eval`: how good a model is."""

import dataclasses
from pathlib import Path
from typing import Annotated, Any

import typer

from jaxserve.cli.bars import Bars
from jaxserve.cli.options import engine_options, takes
from jaxserve.cli.startup import started
from jaxserve.cli.terminal import print_json, visible_line
from jaxserve.config import EngineConfig
from jaxserve.evals.perplexity import Perplexity
from jaxserve.evals.texts import EvalText

app = typer.Typer(help="Measure how good a model is.")


@app.callback()
def evaluate() -> None:
    """Measure how good a model is."""


@app.command()
@takes(config=engine_options())
def perplexity(
    config: EngineConfig,
    text: Annotated[
        Path | None, typer.Option(help="UTF-8 text file; default: a page of prose that comes with jaxserve.")
    ] = None,
    max_length: Annotated[
        int | None, typer.Option(help="Tokens of a window; default: 1024, or what the model takes.")
    ] = None,
    stride: Annotated[
        int | None, typer.Option(help="Tokens from one window to the next; default: half a window.")
    ] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print JSON instead of lines.")] = False,
) -> None:
    """Perplexity and bits per byte of a text under a model. The same figures on every run."""
    from jaxserve.evals.perplexity import lengths, measure
    from jaxserve.evals.texts import read_text

    read = read_text(text)
    with started(config, needs_text=True) as running:
        length, step = lengths(running.frontend.max_model_len, max_length, stride)
        bars = Bars()
        running.frontend.prepare(length, 1, bars)
        with bars.task("scoring bytes", read.num_bytes) as advance:
            found = measure(
                running.frontend, read.text, max_length=length, stride=step, advance=_shares(advance, read.num_bytes)
            )
    content = as_json(found, read, running.frontend.model_name)
    if json_:
        print_json(content)
    else:
        for line in lines(content):
            print(visible_line(line))


def _shares(advance: Any, total: int) -> Any:
    """From windows done to the bar's units, which are fixed before the number of windows is known."""
    shown = 0

    def saw(done: int, num_windows: int) -> None:
        nonlocal shown
        now = total * done // num_windows
        advance(now - shown)
        shown = now

    return saw


def as_json(found: Perplexity, text: EvalText, model: str) -> dict[str, Any]:
    """The figures and what they are of."""
    return {
        "model": model,
        "text": text.name,
        "text_sha256": text.sha256,
        **dataclasses.asdict(found),
        "nats_per_token": found.nats_per_token,
        "bits_per_byte": found.bits_per_byte,
        "perplexity": found.perplexity,
    }


def lines(content: dict[str, Any]) -> list[str]:
    """For a person."""
    return [
        f"model           {content['model']}",
        f"text            {content['text']}, sha256 {content['text_sha256'][:16]}",
        f"windows         {content['num_windows']:,} of {content['max_length']:,} tokens, stride {content['stride']:,}",
        f"tokens scored   {content['num_tokens']:,} ({content['num_bytes']:,} bytes)",
        f"nats per token  {content['nats_per_token']:.8f}",
        f"bits per byte   {content['bits_per_byte']:.8f}",
        f"perplexity      {content['perplexity']:.6f}",
    ]
