"""Command-line options made from the dataclasses they fill, so that no option is written down twice.

`@takes(config=engine_options())` replaces a command's parameter `config` by one option for each field of EngineConfig,
and calls the command with the finished object. Typer reads the signature that is made here.
"""

import dataclasses
import functools
import inspect
import os
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from checkpoints.catalog import DEFAULT_MODEL
from checkpoints.hub import default_cache_dir
from jaxserve.cli.values import bias_entry, human_number, template_source
from jaxserve.config import EngineConfig
from jaxserve.sampling_params import SamplingParams
from jaxserve.server.options import ServerOptions

MODEL_HELP = "A catalog name, a .gguf file, a folder of safetensors, or hf:ORG/REPO."
CACHE_DIR_HELP = "Models and compiled programs live here; default: $JAXSERVE_HOME, or ~/.cache/jaxserve."


@dataclass(frozen=True, kw_only=True)
class Flag:
    """One field on the command line. None stands for what the field itself says: its name, its type."""

    help: str
    names: tuple[str, ...] | None = None
    annotation: Any = None
    parser: Callable[[str], Any] | None = None
    metavar: str | None = None
    envvar: str | None = None


@dataclass(frozen=True, kw_only=True)
class OptionGroup:
    """Options that together make one object; `build` gets their values by field name."""

    parameters: tuple[inspect.Parameter, ...]
    build: Callable[[dict[str, Any]], Any]


@dataclass(frozen=True, kw_only=True)
class SamplingChoice:
    """Sampling as a command line names it. otherwise: the command's own defaults, which the model's go before.

    Raises InvalidRequest on construction for what no model could make right.
    """

    named: Mapping[str, Any]
    otherwise: Mapping[str, Any]

    def __post_init__(self) -> None:
        self.over({})

    def over(self, model_defaults: Mapping[str, Any]) -> SamplingParams:
        """What to sample with, once the model is known."""
        return SamplingParams(**{**self.otherwise, **model_defaults, **self.named})


def takes(**groups: OptionGroup) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorates a command: each named parameter of it becomes the options of a group."""

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        own = [p for p in inspect.signature(command).parameters.values() if p.name not in groups]
        added = [p for group in groups.values() for p in group.parameters]
        signature = inspect.Signature([p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in (*added, *own)])

        @functools.wraps(command)
        def run(**values: Any) -> Any:
            built = {}
            for name, group in groups.items():
                built[name] = group.build({p.name: values.pop(p.name) for p in group.parameters})
            return command(**values, **built)

        run.__signature__ = signature  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in signature.parameters.values()}
        return run

    return decorate


def engine_options(*, default_model: str = DEFAULT_MODEL) -> OptionGroup:
    """MODEL and every field of EngineConfig, as a parameter of type EngineConfig."""
    argument = typer.Argument(help=MODEL_HELP, show_default=True)
    model = _parameter("model", Annotated[str, argument], default_model)
    rest = [_option(EngineConfig, name, flag) for name, flag in ENGINE_FLAGS.items()]
    return OptionGroup(parameters=(model, *rest), build=_engine_config)


def sampling_options(*, leave_out: Sequence[str] = (), **defaults: Any) -> OptionGroup:
    """The fields of SamplingParams but `seed`, `detokenize` and those left out, as a parameter of type SamplingChoice.

    defaults: those that differ from the fields' own. --seed belongs to the engine, which gives it to requests that
    name none.
    """
    flags = {name: flag for name, flag in SAMPLING_FLAGS.items() if name not in leave_out}
    own = {f.name: f.default for f in dataclasses.fields(SamplingParams)} | defaults
    parameters = tuple(
        _unnamed(_option(SamplingParams, name, flag), flag, own[name])
        if name in MODEL_DEFAULTS
        else _option(SamplingParams, name, flag)
        for name, flag in flags.items()
    )
    return OptionGroup(parameters=parameters, build=functools.partial(_sampling_choice, defaults))


def _unnamed(option: inspect.Parameter, flag: Flag, default: Any) -> inspect.Parameter:
    """The option with None where it is not named: a model may have a default that goes before the command's."""
    kind = flag.annotation or typing.get_args(option.annotation)[0]
    shown = typer.Option(
        f"--{option.name.replace('_', '-')}", help=flag.help, show_default=f"the model's, or {default}"
    )
    return _parameter(option.name, Annotated[kind | None, shown], None)


def server_options() -> OptionGroup:
    """Every field of ServerOptions, as a parameter of that type."""
    options = [_option(ServerOptions, name, flag) for name, flag in SERVER_FLAGS.items()]
    return OptionGroup(parameters=tuple(options), build=_server_options)


def _option(cls: type, name: str, flag: Flag) -> inspect.Parameter:
    found = next(f for f in dataclasses.fields(cls) if f.name == name)
    annotation = flag.annotation or found.type
    repeatable = annotation == list[str]
    dashed = name.replace("_", "-")
    switches_off = annotation is bool and found.default is True
    names = flag.names or (f"--{dashed}/--no-{dashed}" if switches_off else f"--{dashed}",)
    option = typer.Option(
        *names,
        help=flag.help,
        parser=flag.parser,
        metavar=flag.metavar,
        envvar=flag.envvar,
        show_default=found.default is not None and not repeatable,
    )
    return _parameter(name, Annotated[annotation, option], [] if repeatable else found.default)


def _parameter(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def model_cache(cache_dir: Path | None) -> Path:
    """Where models are kept: as given, or as the environment says."""
    return cache_dir or default_cache_dir(os.environ)


def cache_folders(
    environ: Mapping[str, str], cache_dir: Path | None, compilation_cache_dir: Path | None
) -> tuple[Path, Path]:
    """Where models and compiled programs are kept. JAX's own variable for the latter is respected."""
    home = cache_dir or default_cache_dir(environ)
    named = compilation_cache_dir or environ.get("JAX_COMPILATION_CACHE_DIR")
    return home, Path(named).expanduser() if named else home / "xla"


def _engine_config(values: dict[str, Any]) -> EngineConfig:
    folders = cache_folders(os.environ, values["cache_dir"], values["compilation_cache_dir"])
    return EngineConfig(**{**values, "cache_dir": folders[0], "compilation_cache_dir": folders[1]})


def _sampling_choice(defaults: Mapping[str, Any], values: dict[str, Any]) -> SamplingChoice:
    values["logit_bias"] = dict(map(bias_entry, values["logit_bias"])) or None
    values["stop"] = values["stop"] or None
    values["stop_token_ids"] = values["stop_token_ids"] or None
    named = {name: value for name, value in values.items() if name not in MODEL_DEFAULTS or value is not None}
    return SamplingChoice(named=named, otherwise=defaults)


def _server_options(values: dict[str, Any]) -> ServerOptions:
    frozen: dict[str, Any] = {k: tuple(v) if isinstance(v, list | tuple) else v for k, v in values.items()}
    return ServerOptions(**frozen)


def _number(help: str, *names: str) -> Flag:
    """A count that may be written as people do: 8192, 8k (8,000), 8K (8,192)."""
    return Flag(help=help, names=names or None, annotation=int, parser=human_number, metavar="NUMBER")


ENGINE_FLAGS: dict[str, Flag] = {
    "dtype": Flag(help="Type of activations."),
    "max_model_len": _number("Longest prompt plus answer, in tokens. 8k is 8,000 and 8K is 8,192."),
    "max_num_seqs": _number("Sequences that may run at once."),
    "max_num_batched_tokens": _number("Tokens computed in one step at most."),
    "page_size": _number("Tokens per KV page.", "--page-size", "--block-size"),
    "num_pages": _number("KV pages, each of all layers; computed from memory when left out."),
    "kv_cache_memory_bytes": _number("Memory for the KV cache, such as 2G (2 * 1024^3)."),
    "kv_cache_dtype": Flag(help="Type of keys and values in the cache."),
    "threads": Flag(
        help="Threads on the host; default: one for each physical core this process may use.",
        annotation=int,
        metavar="NUMBER",
        envvar="NPROC",  # XLA's own variable
    ),
    "kernels": Flag(help="Implementation of attention and quantized products."),
    "cpu_level": Flag(help="Instructions the CPU kernels may use, for comparing; auto takes the best this CPU has."),
    "expand_weights": Flag(help="Whether packed weights are written out at load."),
    "plan": Flag(help="Sharding plan: tensor, expert or data (all devices along that axis), or a TOML file."),
    "tensor_parallel_size": _number(
        "Devices that share heads, widths and the vocabulary.", "--tensor-parallel-size", "-tp"
    ),
    "expert_parallel_size": _number(
        "Devices that the experts of a mixture are dealt out to.", "--expert-parallel-size", "-ep"
    ),
    "data_parallel_size": _number(
        "Groups of devices with requests of their own, which share the experts of a mixture.",
        "--data-parallel-size",
        "-dp",
    ),
    "coordinator": Flag(
        help="HOST:PORT of host 0, where several hosts run a model together; it takes PORT and PORT + 1.",
        annotation=str,
        metavar="HOST:PORT",
    ),
    "num_hosts": _number("Hosts that run the model together."),
    "host_id": _number("Which of them this is; 0 schedules and serves."),
    "host_timeout": _number("Seconds to wait for the other hosts at start."),
    "seed": Flag(help="Seed of requests that name none."),
    "enable_prefix_caching": Flag(help="Reuse the cache of prompts that begin alike."),
    "overlap": Flag(help="Dispatch the next step before the last one's tokens are read."),
    "deterministic": Flag(help="A request's logits are bit-identical in every batch."),
    "max_waiting": _number("Requests queued before new ones are refused."),
    "chat_template": Flag(
        help="Jinja chat template, a file or the text itself, instead of the model's.",
        parser=template_source,
        annotation=str,
        metavar="FILE|TEXT",
    ),
    "generation_config": Flag(
        help="Sampling defaults and ends: auto takes the model's generation_config.json, none has none.",
        metavar="auto|none|PATH",
    ),
    "cache_dir": Flag(help=CACHE_DIR_HELP),
    "compilation_cache_dir": Flag(help="Compiled programs live here; default: xla in the cache folder."),
}

SAMPLING_FLAGS: dict[str, Flag] = {
    "max_tokens": Flag(help="Tokens to generate at most.", annotation=int),
    "temperature": Flag(help="0 always takes the likeliest token."),
    "top_p": Flag(help="Keep the likeliest tokens that together have this probability."),
    "top_k": Flag(help="Keep so many tokens; 0 or -1 keeps all."),
    "min_p": Flag(help="Drop tokens less likely than this share of the likeliest."),
    "repetition_penalty": Flag(help="Above 1 makes every token seen so far less likely."),
    "presence_penalty": Flag(help="Subtracted from the logit of tokens generated before."),
    "frequency_penalty": Flag(help="As the above, times the number of occurrences."),
    "logit_bias": Flag(help="Added to a token's logit; repeatable.", annotation=list[str], metavar="TOKEN_ID=NUMBER"),
    "stop": Flag(help="Text that ends the answer; repeatable.", annotation=list[str]),
    "stop_token_ids": Flag(
        help="Token that ends the answer; repeatable.",
        names=("--stop-token-ids", "--stop-token-id"),
        annotation=list[int],
    ),
    "include_stop_str_in_output": Flag(help="Keep the stop text in the answer."),
    "ignore_eos": Flag(help="Go on after the end-of-sequence token."),
    "min_tokens": Flag(help="Tokens before an end is allowed."),
    "n": Flag(help="Answers to the same prompt.", names=("--n", "-n")),
    "logprobs": Flag(help="Log probabilities of so many alternatives per token."),
    "prompt_logprobs": Flag(help="The same for the prompt."),
    "skip_special_tokens": Flag(help="Leave special tokens out of the text."),
}

# What generation_config.json may set. Not named on the command line, these are the model's, then the command's.
MODEL_DEFAULTS = frozenset({"temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_tokens"})

SERVER_FLAGS: dict[str, Flag] = {
    "host": Flag(help="Address to listen on."),
    "port": Flag(help="Port to listen on; 0 takes any free one."),
    "api_keys": Flag(
        help="Key that clients must send; repeatable.",
        names=("--api-key",),
        annotation=list[str],
        envvar="JAXSERVE_API_KEY",
    ),
    "served_model_names": Flag(
        help="Name that clients use; repeatable.", names=("--served-model-name",), annotation=list[str]
    ),
    "max_body_bytes": _number("Largest request body."),
    "drain_timeout_seconds": Flag(
        help="Seconds that running requests may take after SIGTERM.", names=("--drain-timeout",), metavar="SECONDS"
    ),
    "root_path": Flag(help="Path prefix that a proxy in front takes off."),
    "allowed_origins": Flag(help="CORS origin, or *; repeatable.", annotation=list[str]),
    "access_log": Flag(help="One line per HTTP request."),
}
