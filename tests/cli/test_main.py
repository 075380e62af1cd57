"""One line for each failure, the exit code it deserves, and no jax where none is needed."""

import os
import signal
import socket
import subprocess
import sys

import pytest

import jaxserve
from checkpoints.errors import CheckpointError, DownloadError
from jaxserve.cli import main
from jaxserve.errors import ConfigError, EngineDied, ModelNotFound


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["foo"], "No such command 'foo'"),
        (["pul"], "Did you mean 'pull'?"),
        (["--foo"], "No such option: --foo"),
        (["generate", "-p", "x", "--foo"], "No such option: --foo (see jaxserve generate --help)"),
        (["generate"], "give one of --prompt TEXT and --prompt-token-ids IDS"),
        (["generate", "-p", "x", "--max-model-len", "8Q"], "'8Q' is no whole number"),
        (["generate", "-p", "x", "--max-model-len", "0"], "--max-model-len must be an integer of at least 2"),
        (["generate", "-p", "x", "--dtype", "int3"], "'int3'"),
        (["generate", "-p", "x", "--plan", "tp8"], "--plan tp8: neither tensor"),
        (["generate", "-p", "x", "-tp", "0"], "--tensor-parallel-size must be an integer of at least 1"),
        (["generate", "-p", "x", "--temperature", "-1"], "temperature must be from 0 to 100"),
        (["generate", "-p", "x", "--logit-bias", "z"], "TOKEN_ID=NUMBER"),
        (["serve", "--port", "99999"], "port must be from 0 to 65535"),
        (["pull", "no-such-model"], "'no-such-model' is no model"),
        (["inspect", "no-such-model"], "'no-such-model' is no model"),
    ],
)
def test_wrong_usage_is_one_line_and_2(run, starts, arguments, said):
    ran = run(*arguments)
    assert said in ran.error_line()
    assert (ran.code, ran.out, starts.configs) == (2, "", [])
    assert len(ran.err.splitlines()) == 1


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (ConfigError("no"), 2, "no"),
        (ModelNotFound("no"), 2, "no"),
        (DownloadError("broken\nline"), 1, "broken line"),
        (CheckpointError("odd name \x1b[31m"), 1, r"odd name \x1b[31m"),
        (EngineDied("dead"), 1, "dead"),
        (FileNotFoundError(2, "No such file", "a.txt"), 1, "a.txt: No such file"),
        (ValueError("oops"), 1, "ValueError: oops (set JAXSERVE_TRACEBACK=1 to see where)"),
    ],
)
def test_failures_have_their_code(run, monkeypatch, error, code, said):
    def fail(*arguments, **options):
        raise error

    monkeypatch.setattr("jaxserve.offline.start_frontend", fail)
    ran = run("generate", "-p", "x")
    assert (ran.code, ran.error_line()) == (code, f"jaxserve: error: {said}")


def test_a_damaged_file_is_one_line_and_1(run, tmp_path):
    (tmp_path / "m.gguf").write_bytes(b"GGUF" + b"\xff" * 40)
    ran = run("inspect", str(tmp_path / "m.gguf"))
    assert ran.code == 1
    assert "m.gguf" in ran.error_line()


def test_a_port_in_use_is_found_before_the_model_is_loaded(run, starts):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        ran = run("serve", "--port", str(taken.getsockname()[1]))
    assert ran.code == 2
    assert "Address already in use" in ran.error_line()
    assert starts.configs == []


def test_a_traceback_on_request(run, monkeypatch):
    def fail(*arguments, **options):
        raise ValueError("oops")

    monkeypatch.setattr("jaxserve.offline.start_frontend", fail)
    monkeypatch.setenv("JAXSERVE_TRACEBACK", "1")
    ran = run("generate", "-p", "x")
    assert "Traceback" in ran.err
    assert "in fail" in ran.err


def test_a_foreign_package_is_one_line(run, monkeypatch):
    def fail():
        raise ImportError("sharding.py hides jaxserve's own package 'sharding'")

    monkeypatch.setattr(main, "require_own_packages", fail)
    ran = run("pull")
    assert ran.code == 1
    assert ran.error_line().endswith("hides jaxserve's own package 'sharding'")


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit(3)])
def test_an_end_from_inside_becomes_a_code(run, monkeypatch, error):
    def fail(*arguments, **options):
        raise error

    monkeypatch.setattr("jaxserve.offline.start_frontend", fail)
    ran = run("generate", "-p", "x")
    assert ran.code == (130 if error is KeyboardInterrupt else 3)
    assert "Traceback" not in ran.err


def test_version(run):
    ran = run("--version")
    assert (ran.code, ran.out) == (0, f"jaxserve {jaxserve.__version__}\n")


def test_help_names_every_command_and_whole_options(run):
    ran = run()
    assert ran.code == 0
    for name in ("pull", "inspect", "generate", "chat", "serve", "doctor", "bench"):
        assert f"  {name} " in ran.out
    assert "--max-num-batched-tokens NUMBER" in run("generate", "--help").out


def _python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=45)


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["pull", "--list"], ["generate", "--help"]])
def test_no_jax_where_none_is_needed(arguments):
    done = _python(
        "import sys\nfrom jaxserve.cli.main import run_command\n"
        f"code = run_command({arguments!r})\nprint('loaded', code, 'jax' in sys.modules)"
    )
    assert done.stdout.splitlines()[-1] == "loaded 0 False", done.stderr


def test_a_pull_needs_no_jax(tmp_path):
    (tmp_path / "model.gguf").write_bytes(b"x")
    done = _python(
        "import sys\nfrom jaxserve.cli.main import run_command\n"
        f"code = run_command(['pull', {str(tmp_path / 'model.gguf')!r}])\nprint('loaded', code, 'jax' in sys.modules)"
    )
    assert done.stdout.splitlines()[-1] == "loaded 0 False", done.stderr


def test_a_reader_that_left_is_no_news():
    reading, writing = os.pipe()
    os.close(reading)
    code = "from jaxserve.cli.main import run; import sys; sys.argv = ['jaxserve', 'pull', '--list']; run()"
    try:
        done = subprocess.run([sys.executable, "-c", code], stdout=writing, stderr=subprocess.PIPE, check=False)
    finally:
        os.close(writing)
    assert (done.returncode, done.stderr) == (1, b"")


def test_an_interrupt_leaves_even_while_another_thread_is_busy():
    code = (
        "import os, signal, sys, threading, time\nfrom jaxserve.cli import main\n"
        "threading.Thread(target=time.sleep, args=(60,)).start()\n"
        "main.build_app = lambda: os.kill(os.getpid(), signal.SIGINT)\n"
        "main.run()"
    )
    assert _python(code).returncode == 128 + signal.SIGINT
