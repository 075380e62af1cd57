"""`jaxserve serve`: the OpenAI-compatible server for one model."""

import gc

import typer

from jaxserve.cli.options import engine_options, server_options, takes
from jaxserve.cli.report import choice_lines, program_lines
from jaxserve.cli.startup import Started, start
from jaxserve.cli.terminal import note
from jaxserve.config import EngineConfig
from jaxserve.server.options import ServerOptions


@takes(config=engine_options(), server=server_options())
def serve(config: EngineConfig, server: ServerOptions) -> None:
    """Serve a model over HTTP. Every program is compiled before the first request is accepted."""
    from jaxserve.server.app import create_app
    from jaxserve.server.run import check_port, run_server

    if config.host_id:
        return _follow(config)
    check_port(server)
    running = start(config, warm_up=True)
    try:
        print_report(running)
        app = create_app(running.frontend, server)
    except BaseException:
        running.frontend.close()
        raise
    gc.collect()
    gc.freeze()  # what start-up left is never garbage: keep full collections from walking it between two steps
    raise typer.Exit(run_server(app, running.frontend, server, startup_seconds=running.seconds))


def _follow(config: EngineConfig) -> None:
    """Another host than the first: it computes what that one schedules, and serves nothing."""
    from jaxserve.cli.bars import Bars
    from jaxserve.offline import follow

    bars = Bars()
    follow(config, bars, lambda: bars.note(f"host {config.host_id} of {config.num_hosts} computes for host 0"))


def print_report(running: Started) -> None:
    """The short report, then each choice with its reason, then each program."""
    sections = (
        ("", running.lines()),
        ("effective configuration:", choice_lines(running.frontend.effective_config())),
        ("programs:", program_lines(running.frontend.programs)),
    )
    for heading, lines in sections:
        if heading:
            note(heading)
        for line in lines:
            note(f"  {line}" if heading else line)
