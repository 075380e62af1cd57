"""The server starts warm, says what it decided, and gets the operator's options."""

import dataclasses

import pytest

from jaxserve.server import app as server_app
from jaxserve.server import run as server_run


@dataclasses.dataclass(frozen=True)
class Compiled:
    name: str
    seconds: float
    from_cache: bool
    temp_bytes: int


@pytest.fixture
def served(monkeypatch) -> list[tuple]:
    """Arguments of every `run_server`, which ends at once with code 0."""
    calls: list[tuple] = []

    def run_server(app, frontend, options, *, startup_seconds):
        calls.append((app, frontend, options, startup_seconds))
        return 0

    monkeypatch.setattr(server_run, "run_server", run_server)
    monkeypatch.setattr(server_app, "create_app", lambda frontend, options: ("app of", frontend))
    return calls


def test_it_starts_warm_and_serves(run, starts, served):
    ran = run("serve", "some-model", "--port", "0", "--api-key", "k", "--max-num-seqs", "4")
    assert ran.code == 0
    [(app, frontend, options, startup_seconds)] = served
    assert app == ("app of", starts.frontend)
    assert frontend is starts.frontend
    assert (options.port, options.api_keys) == (0, ("k",))
    assert startup_seconds > 0
    assert starts.warm_ups == [True]
    assert (starts.configs[0].model, starts.configs[0].max_num_seqs) == ("some-model", 4)


def test_it_says_each_choice_and_each_program(run, starts, served):
    starts.frontend.programs = [Compiled("1x16", 2.5, False, 2048), Compiled("8x64", 0.25, True, 0)]
    lines = run("serve", "--port", "0").err.splitlines()
    assert "programs  2, 2.8 s of compiling added up, 1 of them from the compilation cache" in lines
    after = lines[lines.index("effective configuration:") :]
    assert after == [
        "effective configuration:",
        "  kernels      xla: because",
        "  step_shapes  a, b: compiled",
        "programs:",
        "  1x16    2.50 s  compiled  2,048 temporary bytes",
        "  8x64    0.25 s  cached    0 temporary bytes",
    ]


def test_a_failure_before_serving_closes_the_engine(run, starts, served, monkeypatch):
    def fail(frontend, options):
        raise ValueError("no app")

    monkeypatch.setattr(server_app, "create_app", fail)
    ran = run("serve", "--port", "0")
    assert ran.code == 1
    assert "no app" in ran.error_line()
    assert starts.frontend.num_closed == 1
