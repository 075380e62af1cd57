"""OpenAI-compatible servers in processes of their own, ours and llama-cpp-python's, up while a block runs."""

import contextlib
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import httpx

from jaxserve.bench.errors import BenchmarkFailed
from jaxserve.bench.startup import COMMAND, READY


@contextlib.contextmanager
def own_server(arguments: Sequence[str], timeout_seconds: float) -> Iterator[str]:
    """`jaxserve serve` with these arguments on a free port: its address, once it is ready.

    A load names what it samples with; what else a model recommends (top_k, penalties) must not be measured unless the
    arguments ask for it.
    """

    def address(output: str) -> str | None:
        found = READY.search(output)
        return found[1] if found else None

    with running([*COMMAND, "--generation-config=none", *arguments, "--port", "0"], address, timeout_seconds) as url:
        yield url


@contextlib.contextmanager
def llama_cpp_server(
    python: str, model: Path, *, num_threads: int, max_len: int, timeout_seconds: float
) -> Iterator[str]:
    """`python -m llama_cpp.server` under that interpreter: its address, once it answers. It serves one request at a
    time; the others wait in it."""
    port = free_port()
    # logits_all computes logits for every prompt token; interrupt_requests drops an answer when the next request comes.
    options = {
        "model": model,
        "host": "127.0.0.1",
        "port": port,
        "n_threads": num_threads,
        "n_threads_batch": num_threads,
        "n_ctx": max_len,
        "logits_all": False,
        "interrupt_requests": False,
        "verbose": False,
    }
    command = [python, "-m", "llama_cpp.server", *(word for k, v in options.items() for word in (f"--{k}", str(v)))]
    url = f"http://127.0.0.1:{port}"
    with running(command, lambda output: url if _answers(url) else None, timeout_seconds):
        yield url


@contextlib.contextmanager
def running(command: Sequence[str], address: Callable[[str], str | None], timeout_seconds: float) -> Iterator[str]:
    """A server's process. address: where it listens, from what it printed so far, or None while it does not.

    Raises BenchmarkFailed, with the end of what it printed, when it ends or is not ready in time.
    """
    with tempfile.NamedTemporaryFile() as output:  # read by name: a shared position would move the child's
        try:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
        except OSError as error:
            raise BenchmarkFailed(f"{command[0]}: {error.strerror}") from error
        try:
            yield _ready(process, Path(output.name), address, time.perf_counter() + timeout_seconds)
        finally:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10.0)
            process.kill()
            process.wait()


def free_port() -> int:
    """A loopback port nobody listens on now."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def _ready(
    process: subprocess.Popen[bytes], output: Path, address: Callable[[str], str | None], deadline: float
) -> str:
    while True:
        code = process.poll()
        text = output.read_text(errors="replace")
        url = address(text) if code is None else None
        if url is not None:
            return url
        if code is not None or time.perf_counter() > deadline:
            state = "was not ready in time" if code is None else f"ended with exit code {code} before it was ready"
            end = " ".join(text.split())[-300:] or "(nothing)"
            raise BenchmarkFailed(f"the server {state}; it printed: {end}")
        time.sleep(0.05)


def _answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/v1/models", trust_env=False, timeout=5.0).status_code == 200
    except httpx.HTTPError:
        return False
