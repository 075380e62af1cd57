"""Two processes run one model as two hosts would: they find each other, answer as one, and end together."""

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from jaxserve.config import EngineConfig
from jaxserve.engine import hosts
from jaxserve.engine.hosts import Follower, HostOptions, Leader
from jaxserve.errors import ConfigError, JaxserveError
from jaxserve.offline import LLM

TESTS = Path(__file__).resolve().parents[1]
SIZES = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "num_pages": 64, "page_size": 16}


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


@pytest.fixture
def both(monkeypatch):
    """Both ends in this process, without JAX's runtime; who was told to leave and why."""
    monkeypatch.setattr(hosts.jax.distributed, "initialize", lambda *args, **options: None)
    left: list[str] = []
    monkeypatch.setattr(hosts, "leave", left.append)
    found: dict[int, Leader | Follower] = {}
    coordinator = f"127.0.0.1:{free_port()}"

    def come(host: int) -> None:
        options = HostOptions(coordinator=coordinator, num_hosts=2, host_id=host, timeout_seconds=20.0)
        found[host] = hosts.join(options, {"dtype": "float32"})

    threads = [threading.Thread(target=come, args=(host,)) for host in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    leader, follower = found[0], found[1]
    assert isinstance(leader, Leader)
    assert isinstance(follower, Follower)
    yield leader, follower, left
    leader.tell("close")
    for thread in threading.enumerate():
        if thread.name in ("host-0", "host-1"):
            thread.join(10)


def test_what_is_told_arrives_in_order(both):
    leader, follower, left = both
    arrays = [np.arange(6, dtype=np.int32).reshape(2, 3), np.array(2.5, np.float32), np.zeros((0, 4), np.int32)]
    leader.tell("sizes", np.array([3, 4]))
    leader.tell("run", *arrays)
    leader.tell("close")
    assert follower.told("sizes")[0].tolist() == [3, 4]
    ((name, got),) = follower.commands()
    assert name == "run"
    for want, array in zip(arrays, got, strict=True):
        assert (array.dtype, array.shape) == (want.dtype, want.shape)
        np.testing.assert_array_equal(array, want)
    assert left == []


def test_an_end_without_a_word_is_noticed_by_both(both):
    leader, _, left = both
    leader._connections[1].shutdown(socket.SHUT_RDWR)
    deadline = time.monotonic() + 10
    while len(left) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert sorted(left) == ["host 0 is gone; ending", "host 1 is gone; ending"]


def test_who_does_not_come_is_named():
    options = HostOptions(coordinator=f"127.0.0.1:{free_port()}", num_hosts=3, host_id=0, timeout_seconds=0.2)
    with pytest.raises(JaxserveError, match=r"host 1, 2 of 3 did not come within 0\.2 s"):
        hosts.join(options, {})
    options = HostOptions(coordinator=f"127.0.0.1:{free_port()}", num_hosts=3, host_id=2, timeout_seconds=0.2)
    with pytest.raises(JaxserveError, match=r"host 0 at 127\.0\.0\.1:\d+ did not answer within 0\.2 s"):
        hosts.join(options, {})


def test_a_host_with_other_options_is_refused():
    coordinator, errors = f"127.0.0.1:{free_port()}", []

    def come(host: int) -> None:
        options = HostOptions(coordinator=coordinator, num_hosts=2, host_id=host, timeout_seconds=20.0)
        try:
            hosts.join(options, {"max_num_seqs": host})
        except JaxserveError as error:
            errors.append(str(error))

    threads = [threading.Thread(target=come, args=(host,)) for host in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(errors) == 2
    assert all("other options or another version" in error for error in errors)


@pytest.mark.parametrize("coordinator", ["9000", "host:", "host:x", "host:65535", ":9000"])
def test_addresses_that_are_none(coordinator):
    with pytest.raises(ConfigError, match="expected HOST:PORT"):
        _ = HostOptions(coordinator=coordinator, num_hosts=2, host_id=0, timeout_seconds=1.0).address


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"coordinator": "a:1"}, "belong together"),
        ({"coordinator": "a:1", "num_hosts": 2, "host_id": 2}, "--host-id 2: ids of --num-hosts 2 go from 0"),
    ],
)
def test_options_that_cannot_be(options, message):
    with pytest.raises(ConfigError, match=message):
        EngineConfig(model="m", **options)


def test_a_notebook_is_host_0():
    with pytest.raises(ConfigError, match="host 0 takes requests"):
        LLM("m", coordinator="127.0.0.1:9000", num_hosts=2, host_id=1)


@contextmanager
def two_hosts(name: str, **parallel: int) -> Iterator[tuple[subprocess.Popen[str], subprocess.Popen[str]]]:
    common = {**SIZES, **parallel, "coordinator": f"127.0.0.1:{free_port()}", "num_hosts": 2}
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(TESTS.parent), "XLA_FLAGS": ""}
    flags = [f"--{key.replace('_', '-')}={value}" for key, value in common.items()]
    code = "import sys; from jaxserve.cli.main import run; sys.argv[0] = 'jaxserve'; run()"
    cache = ["--compilation-cache-dir", os.environ["JAX_COMPILATION_CACHE_DIR"]]
    folder = str(TESTS / "fixtures" / "models" / name)
    commands = (
        [sys.executable, str(TESTS / "models" / "host_run.py"), name, json.dumps(common | {"host_id": 0})],
        [sys.executable, "-c", code, "serve", folder, *flags, "--host-id=1", *cache],
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    processes = [subprocess.Popen(command, env=environment, **pipes) for command in commands]
    try:
        yield processes[0], processes[1]
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def line_of_json(process: subprocess.Popen[str]) -> str:
    """The next such line; libraries write others."""
    assert process.stdout is not None
    return next(line for line in process.stdout if line.startswith("{"))


@pytest.mark.parametrize(
    ("name", "parallel"),
    [
        ("mixtral", {"tensor_parallel_size": 2}),
        pytest.param("deepseek_v3", {"data_parallel_size": 2}, marks=pytest.mark.slow),
    ],
)
def test_two_hosts_answer_as_one_and_end_together(name, parallel):
    with two_hosts(name, **parallel) as (first, second):
        assert json.loads(line_of_json(first)) == {"same": True}
        first.communicate("\n", timeout=60)
        _, said = second.communicate(timeout=60)
        assert (first.returncode, second.returncode) == (0, 0), said
        assert "host 1 of 2 computes for host 0" in said


@pytest.mark.slow
@pytest.mark.parametrize("killed", [0, 1])
def test_killing_one_ends_the_other_with_the_reason(killed):
    with two_hosts("mixtral", tensor_parallel_size=2) as processes:
        line_of_json(processes[0])
        processes[killed].kill()
        _, said = processes[1 - killed].communicate(timeout=30)
        assert processes[1 - killed].returncode == 1
        assert f"jaxserve: error: host {killed} is gone; ending" in said
