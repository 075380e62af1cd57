"""`jaxserve bench peers`: jaxserve beside other engines, each in a process of its own."""

import json
import shlex
import sys
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

import typer

from jaxserve.bench.report import Report
from jaxserve.cli.options import engine_options, takes
from jaxserve.cli.terminal import note
from jaxserve.config import EngineConfig
from jaxserve.errors import ConfigError

ALL_PEERS = "llama.cpp,openvino,transformers"
PeerPython = Annotated[
    list[str],
    typer.Option(metavar="NAME=PATH", help="Interpreter that has a peer installed; repeatable; default: this one."),
]


@takes(config=engine_options())
def peers(
    config: EngineConfig,
    peers: Annotated[str, typer.Option(help="Engines to compare with, separated by commas.")] = ALL_PEERS,
    peer_python: PeerPython = [],  # noqa: B006  (typer copies it)
    num_rounds: Annotated[int, typer.Option(min=1, help="Measured rounds.")] = 5,
    batch_sizes: Annotated[str, typer.Option(help="Sequences decoded at once, separated by commas.")] = "1,8,32",
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens of the prefilled prompt.")] = 512,
    decode_tokens: Annotated[int, typer.Option(min=2, help="Tokens each decoded sequence gets.")] = 64,
    requantize: Annotated[
        str | None, typer.Option(metavar="FORMAT", help="Measure on the model as llama.cpp requantizes it, say Q4_0.")
    ] = None,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds one answer of an engine may take.")] = 600.0,
    out: Annotated[Path | None, typer.Option(metavar="FILE.json", help="Write the JSON there too.")] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Tokens per second of jaxserve and other engines on the same GGUF file, in turns, and the ratios."""
    from jaxserve.bench.peers.bench import PeersSetup, bench_peers
    from jaxserve.bench.peers.engines import peer_commands
    from jaxserve.cli.bars import Bars
    from jaxserve.cli.bench import show
    from jaxserve.offline import find_model

    if out is not None and not out.parent.is_dir():
        raise ConfigError(f"--out {out}: there is no folder {out.parent}")
    pythons = named_pythons(peer_python)
    commands = peer_commands(_names(peers), pythons)
    sizes = {"num_rounds": num_rounds, "prompt_tokens": prompt_tokens, "decode_tokens": decode_tokens}
    setup = PeersSetup(
        **sizes,
        batch_sizes=_numbers("--batch-sizes", batch_sizes),
        **({} if config.threads is None else {"num_threads": config.threads}),
        seed=config.seed,
        timeout_seconds=timeout,
        options=chosen_options(config),
    )
    path = find_model(config.model, config.cache_dir)
    notes = (f"command: {shlex.join(['jaxserve', *sys.argv[1:]])}",)
    if requantize is not None:
        path = _requantized(path, requantize, pythons.get("llama.cpp", sys.executable), config, timeout)
    report = bench_peers(path, commands, Bars(), setup, notes=notes)
    show([report], json_)
    if out is not None:
        _write(report, out)


def named_pythons(entries: list[str]) -> dict[str, str]:
    """NAME=PATH as a dictionary. Raises ConfigError for another form and for a name given twice."""
    pythons: dict[str, str] = {}
    for entry in entries:
        name, equals, path = entry.partition("=")
        if not (name and equals and path) or name in pythons:
            raise ConfigError(
                f"--peer-python takes NAME=PATH once a name, such as llama.cpp=venv/bin/python: {entry!r}"
            )
        pythons[name] = path
    return pythons


def chosen_options(config: EngineConfig) -> dict[str, Any]:
    """What differs from EngineConfig's defaults, as JSON; the model, the prefix cache and the threads, which every
    engine gets alike, are not choices here."""
    chosen = {}
    for field in fields(EngineConfig):
        value = getattr(config, field.name)
        if field.name not in ("model", "enable_prefix_caching", "threads") and value != field.default:
            chosen[field.name] = str(value) if isinstance(value, Path) else value
    return chosen


def _requantized(path: Path, file_format: str, python: str, config: EngineConfig, timeout: float) -> Path:
    from jaxserve.bench.peers.requantize import requantized
    from jaxserve.cli.options import model_cache

    found = requantized(path, file_format, python, model_cache(config.cache_dir) / "requantized", timeout)
    note(f"requantized to {file_format}: {found}")
    return found


def _names(text: str) -> list[str]:
    return list(dict.fromkeys(name for part in text.split(",") if (name := part.strip())))


def _numbers(flag: str, text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(f"{flag} takes whole numbers separated by commas, got {text!r}") from None


def _write(report: Report, path: Path) -> None:
    path.write_text(json.dumps(report.as_dict(), indent=2) + "\n")
    note(f"written: {path}")
