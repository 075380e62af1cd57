"""Starting, asking and ending a real server process, here one over the fake frontend."""

import sys
from pathlib import Path

import pytest

from jaxserve.bench.errors import BenchmarkFailed
from jaxserve.bench.startup import bench_startup, read_once, resident_memory, start_once
from jaxserve.engine.progress import Silent

SERVER = Path(__file__).parent.parent / "server"
RUN = f"""
import os, runpy, sys, time
sys.path.insert(0, {str(SERVER)!r})
sys.argv[1:1] = ["0", "0.1"]  # of serve_fake.py: delay per token, seconds to drain
{{before}}
runpy.run_path({str(SERVER / "serve_fake.py")!r}, run_name="__main__")
"""


def _command(before):
    """A server over the fake frontend, with some statements before it starts."""
    return [sys.executable, "-c", RUN.format(before=before)]


def test_a_first_start_is_compared_with_a_second(tmp_path):
    model = tmp_path / "model.gguf"
    model.write_bytes(b"x")
    seen = tmp_path / "arguments"
    command = _command(f"print(sys.argv[3:], file=open({str(seen)!r}, 'a'))")
    report = bench_startup(
        ["tiny", "--seed=1"],
        model,
        Silent(),
        num_rounds=1,
        timeout_seconds=60.0,
        model={"model": "tiny"},
        command=command,
    )
    first, second = seen.read_text().splitlines()
    assert first == second
    assert first.startswith("['tiny', '--seed=1', '--port', '0', '--compilation-cache-dir', ")
    figures = {figure.name: figure.value.median for figure in report.figures}
    to_token = figures["second start, to the first token"], figures["first start, to the first token"]
    assert figures["second start over first"] == pytest.approx(to_token[0] / to_token[1])
    assert figures["first start, to healthy"] < to_token[1]
    own, resident = figures["second start, resident memory without files"], figures["second start, resident memory"]
    assert 1 < own < resident < 1000
    assert report.settings["command"] == "jaxserve serve tiny --seed=1"


@pytest.mark.parametrize(
    ("before", "message"),
    [
        ("sys.exit('no such model')", "exit code 1 before it was ready; its stderr ended: no such model"),
        ("print('ready on http://127.0.0.1:9', flush=True); time.sleep(60)", "refused"),
        ("import fake_frontend; fake_frontend.FakeFrontend.close = lambda _: os._exit(5)", "exit code 5 after SIGTERM"),
    ],
)
def test_a_server_that_fails_is_no_measurement(before, message):
    with pytest.raises(BenchmarkFailed, match=message):
        start_once(_command(before), 60.0)


def test_an_answer_that_is_an_error_is_no_token():
    broken = "import fake_frontend; fake_frontend.FakeFrontend.submit = None"
    with pytest.raises(BenchmarkFailed, match=r"the completion (began with|was answered with HTTP 500)"):
        start_once(_command(broken), 60.0)


def test_memory_is_read_from_the_system(tmp_path):
    status = tmp_path / "status"
    assert resident_memory(status) == (None, None)
    status.write_text("Name:\tx\nVmRSS:\t  300 kB\nRssAnon:\t  100 kB\nRssFile:\t  120 kB\nRssShmem:\t 80 kB\n")
    assert resident_memory(status) == (300 * 1024, 180 * 1024)


def test_a_server_that_hangs_is_ended():
    with pytest.raises(BenchmarkFailed, match="not ready in time"):
        start_once(_command("time.sleep(60)"), 0.2)


def test_files_of_a_folder_are_read(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "weights").write_bytes(b"x" * 10)
    read_once(tmp_path)
