"""`jaxserve`: builds the command line, runs one command, and turns every failure into one line and an exit code.

0: done. 1: it failed. 2: the command, the options or the model's name were wrong. 130: interrupted.
"""

import os
import sys
import traceback
from collections.abc import Sequence
from typing import Annotated

import typer

from jaxserve._shadow import require_own_packages
from jaxserve.cli.terminal import visible_line
from jaxserve.errors import ConfigError, InvalidRequest, JaxserveError, ModelNotFound

FAILED, WRONG_USAGE, INTERRUPTED = 1, 2, 130
TRACEBACK_VARIABLE = "JAXSERVE_TRACEBACK"


def run() -> None:
    """The entry point: runs the command of this process and ends it."""
    code = run_command(sys.argv[1:])
    if code == INTERRUPTED:
        os._exit(code)  # the second Ctrl-C: an engine thread that compiles would keep the process for long
    sys.exit(code)


def run_command(arguments: Sequence[str]) -> int:
    """Runs one command line and returns its exit code; an empty one asks for help. What goes wrong is one line."""
    try:
        require_own_packages()
        command = typer.main.get_command(build_app())
        code = command.main(args=list(arguments) or ["--help"], prog_name="jaxserve", standalone_mode=False)
        sys.stdout.flush()
    except BrokenPipeError:
        return _closed_pipe()
    except KeyboardInterrupt:
        return INTERRUPTED
    except SystemExit as error:  # typer ends so when the reader of our output left
        return error.code if isinstance(error.code, int) else FAILED
    except Exception as error:
        return _failed(error)
    return code if isinstance(code, int) else 0


def build_app() -> typer.Typer:
    """All commands. Their modules import jax, if at all, when they run: `--help` and `pull` stay quick."""
    from jaxserve.cli import bench, chat, convert, doctor, evaluate, generate, inspect, plan, pull, serve

    app = typer.Typer(
        name="jaxserve",
        help="A JAX/XLA inference engine for language models.",
        rich_markup_mode=None,  # boxes cut long option names
        pretty_exceptions_enable=False,
        add_completion=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(jaxserve)
    app.command()(pull.pull)
    app.command()(inspect.inspect)
    app.command()(convert.convert)
    app.command()(generate.generate)
    app.command()(chat.chat)
    app.command()(serve.serve)
    app.command()(plan.plan)
    app.command()(doctor.doctor)
    app.add_typer(bench.app, name="bench")
    app.add_typer(evaluate.app, name="eval")
    return app


def _print_version(wanted: bool) -> bool:
    if wanted:
        import jaxserve as package

        print(f"jaxserve {package.__version__}")
        raise typer.Exit()
    return wanted


def jaxserve(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """A JAX/XLA inference engine for language models."""


def _closed_pipe() -> int:
    """The reader of our output left. Python would complain again when it flushes at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return FAILED


def _failed(error: Exception) -> int:
    if os.environ.get(TRACEBACK_VARIABLE) == "1":
        traceback.print_exception(error)
    message = " ".join(_message(error).split())
    print(f"jaxserve: error: {visible_line(message)}", file=sys.stderr, flush=True)
    return WRONG_USAGE if _is_wrong_usage(error) else FAILED


def _message(error: Exception) -> str:
    """What happened; errors nobody expected carry their type and how to see more."""
    if isinstance(error, typer.Abort):
        return "aborted"
    if _is_from_typer(error):
        context = getattr(error, "ctx", None)
        hint = f" (see {context.command_path} --help)" if context else ""
        return error.format_message() + hint  # type: ignore[attr-defined]
    if isinstance(error, OSError) and error.strerror:
        return error.strerror if error.filename is None else f"{error.filename}: {error.strerror}"
    if _is_expected(error):
        return str(error)
    return f"{type(error).__name__}: {error} (set {TRACEBACK_VARIABLE}=1 to see where)"


def _is_from_typer(error: Exception) -> bool:
    """Its usage errors are click's own or a copy of them, depending on its version; both have these."""
    return hasattr(error, "format_message") and hasattr(error, "exit_code")


def _is_expected(error: Exception) -> bool:
    from checkpoints.errors import CheckpointError, DownloadError, UnknownModel  # known to be ours by now

    return isinstance(error, JaxserveError | CheckpointError | DownloadError | UnknownModel | ImportError)


def _is_wrong_usage(error: Exception) -> bool:
    if isinstance(error, ConfigError | ModelNotFound | InvalidRequest):
        return True
    if _is_from_typer(error):
        return error.exit_code == WRONG_USAGE  # type: ignore[attr-defined]
    return type(error).__name__ == "UnknownModel" and _is_expected(error)
