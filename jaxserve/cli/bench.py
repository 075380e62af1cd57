"""`jaxserve bench`: one command per benchmark; without one, those the project's targets are about."""

import contextlib
import inspect
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import fields
from typing import Annotated, Any

import typer

from jaxserve.bench.report import Report
from jaxserve.bench.workload import Dataset, Workload
from jaxserve.cli.bench_against import Opponent, PeerServer, compare_servers
from jaxserve.cli.bench_divergence import divergence
from jaxserve.cli.bench_experts import experts
from jaxserve.cli.bench_peers import peers
from jaxserve.cli.options import ENGINE_FLAGS, OptionGroup, engine_options, takes
from jaxserve.cli.terminal import print_json
from jaxserve.config import EngineConfig
from jaxserve.errors import ConfigError

app = typer.Typer(help="Measure the engine. Without a command: batching, prefix, host and startup.")
app.command()(peers)
app.command()(divergence)
app.command()(experts)

Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]
NumPrompts = Annotated[int, typer.Option(min=1, help="Requests.")]
InputLen = Annotated[int, typer.Option(min=1, help="Tokens of each prompt.")]
OutputLen = Annotated[int, typer.Option(min=1, help="Tokens generated for each prompt.")]
Rounds = Annotated[int, typer.Option(min=1, help="Measured rounds.")]
DatasetOption = Annotated[
    Dataset, typer.Option(help="random: fixed lengths. sharegpt-like: log-normal lengths, see the output.")
]


def _context() -> OptionGroup:
    """The parsed command line, as a parameter of type Any: typer announces another class than it passes."""
    parameter = inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)
    return OptionGroup(parameters=(parameter,), build=lambda values: values["context"])


@app.callback(invoke_without_command=True)
@takes(context=_context())
def bench(context: Any) -> None:
    """Measure the engine. Without a command: batching, prefix, host and startup on the default model."""
    if context.invoked_subcommand is None:
        command = context.command.get_command(context, "targets")
        with command.make_context("targets", [], parent=context) as inner:
            command.invoke(inner)


@app.command()
@takes(config=engine_options())
def latency(
    config: EngineConfig,
    input_len: InputLen = 128,
    output_len: OutputLen = 64,
    batch_size: Annotated[int, typer.Option(min=1, help="Requests in a batch.")] = 1,
    num_iters: Annotated[int, typer.Option(min=1, help="Measured batches.")] = 5,
    num_iters_warmup: Annotated[int, typer.Option(min=0, help="Batches before that are not counted.")] = 1,
    json_: Json = False,
) -> None:
    """Time of one batch: end to end, to the first token, per further token."""
    from jaxserve.bench.latency import bench_latency

    sizes = {"input_len": input_len, "output_len": output_len, "batch_size": batch_size}
    iterations = {"num_iters": num_iters, "num_iters_warmup": num_iters_warmup}
    with _measured(config) as (frontend, progress):
        show([bench_latency(frontend, progress, **sizes, **iterations, seed=config.seed)], json_)


@app.command()
@takes(config=engine_options())
def throughput(
    config: EngineConfig,
    dataset: DatasetOption = "random",
    num_prompts: NumPrompts = 64,
    input_len: InputLen = 128,
    output_len: OutputLen = 64,
    num_iters: Rounds = 3,
    json_: Json = False,
) -> None:
    """Tokens and requests per second, all requests submitted at once."""
    from jaxserve.bench.throughput import bench_throughput

    sizes = {"num_prompts": num_prompts, "input_len": input_len, "output_len": output_len, "num_iters": num_iters}
    with _measured(config) as (frontend, progress):
        show([bench_throughput(frontend, progress, dataset=dataset, **sizes, seed=config.seed)], json_)


@app.command()
@takes(config=engine_options())
def batching(
    config: EngineConfig,
    concurrency: Annotated[int, typer.Option(min=2, help="Requests at once.")] = 32,
    input_len: InputLen = 32,
    output_len: OutputLen = 64,
    num_rounds: Rounds = 5,
    json_: Json = False,
) -> None:
    """Tokens per second of many requests at once over those of one, in turns."""
    from jaxserve.bench.batching import bench_batching

    sizes = {"concurrency": concurrency, "input_len": input_len, "output_len": output_len, "num_rounds": num_rounds}
    with _measured(config) as (frontend, progress):
        show([bench_batching(frontend, progress, **sizes, seed=config.seed)], json_)


@app.command()
@takes(config=engine_options())
def prefix(
    config: EngineConfig,
    prefix_len: Annotated[int, typer.Option(min=1, help="Tokens that requests share.")] = 1000,
    suffix_len: Annotated[int, typer.Option(min=1, help="Tokens that differ after them.")] = 16,
    num_rounds: Rounds = 7,
    json_: Json = False,
) -> None:
    """Time to the first token with a cached prefix over the time without, in turns."""
    from jaxserve.bench.prefix import bench_prefix

    sizes = {"prefix_len": prefix_len, "suffix_len": suffix_len, "num_rounds": num_rounds}
    with _measured(config) as (frontend, progress):
        show([bench_prefix(frontend, progress, **sizes, seed=config.seed)], json_)


@app.command()
def host(
    num_seqs: Annotated[int, typer.Option(min=1, help="Running requests.")] = 256,
    num_steps: Annotated[int, typer.Option(min=1, help="Measured steps.")] = 1000,
    num_warmup_steps: Annotated[int, typer.Option(min=0, help="Steps before that are not counted.")] = 100,
    seed: Annotated[int, typer.Option(help="Of the prompts' lengths and tokens.")] = 0,
    json_: Json = False,
) -> None:
    """Time per step that the scheduler and the filling of inputs take, without a device."""
    from jaxserve.bench.host import bench_host

    report = bench_host(num_seqs=num_seqs, num_steps=num_steps, num_warmup_steps=num_warmup_steps, seed=seed)
    show([report], json_)


@app.command()
@takes(config=engine_options(), context=_context())
def startup(
    context: Any,
    config: EngineConfig,
    num_rounds: Rounds = 3,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds one start may take.")] = 600.0,
    json_: Json = False,
) -> None:
    """Time from process start to first token of `jaxserve serve`: first start against second."""
    if _given(context, "compilation_cache_dir"):
        raise ConfigError("bench startup uses a fresh compilation cache; leave --compilation-cache-dir out")
    show([_startup(config, num_rounds, timeout)], json_)


@app.command()
@takes(config=engine_options(), context=_context())
def serve(
    context: Any,
    config: EngineConfig,
    base_url: Annotated[str | None, typer.Option(help="Server to load; left out: one is started for MODEL.")] = None,
    served_model: Annotated[str | None, typer.Option("--model", help="Name in requests; default: ask.")] = None,
    api_key: Annotated[str | None, typer.Option(envvar="OPENAI_API_KEY", help="Sent as bearer token.")] = None,
    vocab_size: Annotated[int, typer.Option(min=1, help="Prompt token ids lie below; with --base-url.")] = 32_000,
    request_rate: Annotated[float, typer.Option(help="Arrivals per second (Poisson), or inf.")] = float("inf"),
    max_concurrency: Annotated[int | None, typer.Option(min=1, help="Open requests at most.")] = None,
    dataset: DatasetOption = "random",
    num_prompts: NumPrompts = 64,
    num_warmups: Annotated[int, typer.Option(min=0, help="Requests before that are not counted.")] = 1,
    input_len: InputLen = 128,
    output_len: OutputLen = 64,
    against: Annotated[str | None, typer.Option(metavar="URL", help="A running server to compare ours with.")] = None,
    peer: Annotated[PeerServer | None, typer.Option(help="A server to start and compare ours with.")] = None,
    peer_python: Annotated[str, typer.Option(metavar="PATH", help="Interpreter for --peer.")] = sys.executable,
    num_rounds: Annotated[int, typer.Option(min=1, help="Rounds in turns, with --against or --peer.")] = 3,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds a request may go without a byte.")] = 600.0,
    json_: Json = False,
) -> None:
    """Load a server of the OpenAI API over HTTP and report what its clients see."""
    from jaxserve.bench.serve import Load, bench_serve

    opponent = Opponent(url=against, peer=peer, python=peer_python)
    _check_serve(context, base_url, served_model, is_alone=against is None and peer is None)
    sizes = {"dataset": dataset, "num_prompts": num_prompts, "input_len": input_len, "output_len": output_len}
    sending = {"request_rate": request_rate, "max_concurrency": max_concurrency, "timeout_seconds": timeout}
    if against is not None or peer is not None:
        turns = {"num_rounds": num_rounds, "timeout": timeout, "arguments": _with_caches(config)}
        show([compare_servers(config, opponent, sizes, sending | {"seed": config.seed}, **turns)], json_)
        return
    with contextlib.ExitStack() as stack:
        engine: dict[str, Any] | None = None
        if base_url is None:
            base_url, vocab_size, engine = stack.enter_context(_served(config))
        load = Load(
            base_url=base_url,
            model=served_model,
            api_key=api_key,
            **sending,
            seed=config.seed,
        )
        work = Workload(**sizes, vocab_size=vocab_size, seed=config.seed)
        show([bench_serve(load, work, num_warmups=num_warmups, engine=engine)], json_)


@app.command()
@takes(config=engine_options())
def targets(config: EngineConfig, json_: Json = False) -> None:
    """The figures the project holds itself to: batching, prefix, host and startup."""
    from jaxserve.bench.batching import bench_batching
    from jaxserve.bench.host import bench_host
    from jaxserve.bench.prefix import bench_prefix

    def reports() -> Iterator[Report]:
        yield bench_host(num_seqs=256, num_steps=1000, num_warmup_steps=100)
        with _measured(config) as (frontend, progress):
            sizes = {"concurrency": 32, "input_len": 32, "output_len": 64, "num_rounds": 5}
            yield bench_batching(frontend, progress, **sizes, seed=config.seed)
            sizes = {"prefix_len": 1000, "suffix_len": 16, "num_rounds": 7}
            yield bench_prefix(frontend, progress, **sizes, seed=config.seed)
        yield _startup(config, num_rounds=1, timeout=600.0)

    if json_:
        show(list(reports()), json_)
        return
    for report in reports():  # each as soon as it is there: the whole takes minutes
        show([report], json_)


def show(reports: list[Report], as_json: bool) -> None:
    """Prints reports as tables, or one as a JSON object and several as a list."""
    if as_json:
        found = [report.as_dict() for report in reports]
        print_json(found[0] if len(found) == 1 else found)
        return
    from rich.console import Console

    from jaxserve.bench.report import printable

    console = Console(highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console = Console(highlight=False, markup=False, emoji=False, width=160)
    for report in reports:
        console.print(*printable(report), "", sep="\n")


@contextlib.contextmanager
def _measured(config: EngineConfig) -> Iterator[tuple[Any, Any]]:
    """A frontend with every step compiled, closed at the end, and the bars for its rounds."""
    from jaxserve.cli.bars import Bars
    from jaxserve.cli.startup import start

    with contextlib.closing(start(config, warm_up=True).frontend) as frontend:
        yield frontend, Bars()


def _startup(config: EngineConfig, num_rounds: int, timeout: float) -> Report:
    from jaxserve.bench.startup import bench_startup
    from jaxserve.cli.bars import Bars
    from jaxserve.offline import find_model

    path = find_model(config.model, config.cache_dir)
    return bench_startup(
        engine_arguments(config),
        path,
        Bars(),
        num_rounds=num_rounds,
        timeout_seconds=timeout,
        model={"model": config.model, "file": path.name},
    )


def engine_arguments(config: EngineConfig) -> list[str]:
    """The command line that gives this configuration, but for the compilation cache: MODEL and what is not default."""
    arguments = [config.model]
    for field in fields(EngineConfig):
        value = getattr(config, field.name)
        if field.name in ("model", "compilation_cache_dir") or value == field.default:
            continue
        flag = (ENGINE_FLAGS[field.name].names or (f"--{field.name.replace('_', '-')}",))[0]
        if isinstance(value, bool):
            arguments.append(flag if value else f"--no-{flag.removeprefix('--')}")
        else:
            arguments.append(f"{flag}={value}")  # one word: a chat template may begin with a dash
    return arguments


def _with_caches(config: EngineConfig) -> list[str]:
    """The arguments of this configuration with its compilation cache."""
    folder = config.compilation_cache_dir
    return [*engine_arguments(config), *([] if folder is None else [f"--compilation-cache-dir={folder}"])]


def _given(context: Any, name: str) -> bool:
    """Whether the option was written on the command line."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _check_serve(context: Any, base_url: str | None, served_model: str | None, *, is_alone: bool) -> None:
    """Raises ConfigError for options that would have no effect."""
    compares, loads = ("peer_python", "num_rounds"), ("base_url", "served_model", "api_key", "num_warmups")
    if idle := [name for name in (compares if is_alone else loads) if _given(context, name)]:
        flag = "--model" if idle[0] == "served_model" else f"--{idle[0].replace('_', '-')}"
        reason = "needs --against or --peer" if is_alone else "has no effect with --against or --peer"
        raise ConfigError(f"{flag} {reason}; leave it out")
    if base_url is None:
        wrong = [
            flag
            for flag, name in (("--model", "served_model"), ("--vocab-size", "vocab_size"))
            if _given(context, name)
        ]
        if wrong:
            raise ConfigError(
                f"{' and '.join(wrong)} describe a server at --base-url; name the model to start as MODEL"
            )
        return
    engine = [p.name for p in engine_options().parameters if p.name != "seed" and _given(context, p.name)]
    if engine:
        names = ", ".join("MODEL" if name == "model" else f"--{name.replace('_', '-')}" for name in engine)
        raise ConfigError(
            f"{names} would configure an engine here, but --base-url names a running server; leave one out"
        )


@contextlib.contextmanager
def _served(config: EngineConfig) -> Iterator[tuple[str, int, dict[str, Any]]]:
    """A server for the configured model in this process, on a free loopback port: its address, the vocabulary's size
    and what is known of its engine."""
    from jaxserve.bench.session import facts, vocab_size

    with _measured(config) as (frontend, _):
        found = vocab_size(frontend), facts(frontend)
        with loopback_server(frontend) as url:
            yield url, *found


@contextlib.contextmanager
def loopback_server(frontend: Any) -> Iterator[str]:
    """Serves the frontend in a thread on a free loopback port; its address."""
    import socket

    import uvicorn

    from jaxserve.server.app import create_app
    from jaxserve.server.options import ServerOptions

    listener = socket.create_server(("127.0.0.1", 0))
    settings = uvicorn.Config(
        create_app(frontend, ServerOptions()), ws="none", lifespan="off", log_level="warning", access_log=False
    )
    server = uvicorn.Server(settings)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        _wait(lambda: server.started or not thread.is_alive())
        host, port = listener.getsockname()
        yield f"http://{host}:{port}"
    finally:
        server.should_exit = True
        thread.join()
        listener.close()


def _wait(is_true: Callable[[], bool]) -> None:
    while not is_true():
        time.sleep(0.005)
