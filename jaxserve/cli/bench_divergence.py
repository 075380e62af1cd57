"""`jaxserve bench divergence`: what faster kernels cost in accuracy."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from jaxserve.cli.options import engine_options, takes
from jaxserve.config import EngineConfig, KernelChoice
from jaxserve.errors import ConfigError

Texts = Annotated[list[Path], typer.Option(metavar="FILE", help="UTF-8 text to read; repeatable; default: our own.")]


@takes(config=engine_options())
def divergence(
    config: EngineConfig,
    reference: Annotated[KernelChoice, typer.Option(help="Kernels taken as the truth.")] = "xla",
    text: Texts = [],  # noqa: B006  (typer copies it)
    max_tokens: Annotated[int, typer.Option(min=1, help="Positions compared at most.")] = 4096,
    window: Annotated[int, typer.Option(min=1, help="Tokens of one sequence.")] = 512,
    chunk: Annotated[int, typer.Option(min=1, help="Tokens of one step; 1 compares decoding.")] = 256,
    json_: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """KL divergence in nats of the next token, --kernels (default: cpu) against --reference, over given text."""
    from jaxserve.bench.divergence import DivergenceSetup, bench_divergence, own_texts
    from jaxserve.cli.bars import Bars
    from jaxserve.cli.bench import show

    chosen = replace(config, kernels="cpu") if config.kernels == "auto" else config
    texts = {str(path): _read(path) for path in text} or own_texts()
    sizes = {"max_tokens": max_tokens, "window": window, "chunk": chunk}
    setup = DivergenceSetup(reference=reference, texts=texts, **sizes)
    show([bench_divergence(chosen, Bars(), setup)], json_)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise ConfigError(f"--text {path}: {reason}") from None
