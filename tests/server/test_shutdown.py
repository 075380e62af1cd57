"""run_server as a process: readiness line, draining, exit codes; and the port check."""

import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from jaxserve.errors import ConfigError
from jaxserve.server.options import ServerOptions
from jaxserve.server.run import check_port

HERE = Path(__file__).parent


@contextmanager
def process(token_delay: float, drain_timeout: float) -> Iterator[tuple[subprocess.Popen, str]]:
    """serve_fake.py running; yields it and its base URL, read from the readiness line."""
    command = [sys.executable, str(HERE / "serve_fake.py"), str(token_delay), str(drain_timeout)]
    environment = {"PYTHONPATH": str(HERE.parents[1]), "PATH": ""}
    server = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, cwd=HERE
    )
    assert server.stdout is not None
    assert server.stderr is not None
    try:
        line = server.stdout.readline()
        match = re.fullmatch(
            r"jaxserve ready on (http://127\.0\.0\.1:\d+) \(model fake-model, startup 1\.2 s\)\n", line
        )
        assert match, line + server.stderr.read()
        yield server, match[1]
    finally:
        server.kill()
        server.communicate()


class Streaming(threading.Thread):
    """Streams a completion in the background and keeps what came."""

    def __init__(self, base: str, max_tokens: int) -> None:
        super().__init__()
        self._url = f"{base}/v1/completions"
        self._body = {"prompt": "a", "max_tokens": max_tokens, "stream": True}
        self.events: list[str] = []
        self.error: Exception | None = None

    def run(self) -> None:
        try:
            with httpx.stream("POST", self._url, json=self._body, timeout=20) as answer:
                self.events.extend(line for line in answer.iter_lines() if line)
        except httpx.HTTPError as error:
            self.error = error

    def wait_for_events(self) -> None:
        deadline = time.monotonic() + 10
        while not self.events:
            assert time.monotonic() < deadline
            time.sleep(0.01)


@pytest.mark.parametrize("sig", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_drains_and_exits_with_0(sig):
    with process(token_delay=0.05, drain_timeout=20) as (server, base):
        stream = Streaming(base, max_tokens=12)
        stream.start()
        stream.wait_for_events()
        server.send_signal(sig)
        stream.join(timeout=20)
        assert stream.error is None
        assert stream.events[-1] == "data: [DONE]"
        assert json.loads(stream.events[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
        assert server.wait(timeout=10) == 0
        assert server.communicate()[0] == "closed\n"
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{base}/health")


def test_what_outlives_the_drain_timeout_is_aborted():
    with process(token_delay=0.05, drain_timeout=0.3) as (server, base):
        stream = Streaming(base, max_tokens=10**6)
        stream.start()
        stream.wait_for_events()
        server.send_signal(signal.SIGTERM)
        stream.join(timeout=10)
        assert json.loads(stream.events[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "abort"
        assert server.wait(timeout=10) == 0


def test_a_second_signal_exits_at_once():
    with process(token_delay=0.05, drain_timeout=60) as (server, base):
        stream = Streaming(base, max_tokens=10**6)
        stream.start()
        stream.wait_for_events()
        server.send_signal(signal.SIGTERM)
        time.sleep(0.3)
        assert server.poll() is None
        server.send_signal(signal.SIGTERM)
        assert server.wait(timeout=5) == 128 + signal.SIGTERM
        stream.join(timeout=10)


def test_a_taken_port_is_one_clear_error():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"127\.0\.0\.1:{port}.*--port"):
            check_port(ServerOptions(port=port))
    check_port(ServerOptions(port=port))
    with pytest.raises(ConfigError, match=r"no\.such\.host"):
        check_port(ServerOptions(host="no.such.host.invalid"))
