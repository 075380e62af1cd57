"""How long `jaxserve serve` takes from its process's start to its first token, without and with compiled programs, and
the memory it then takes."""

import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import httpx

from jaxserve.bench.errors import BenchmarkFailed
from jaxserve.bench.measure import interleaved, paired_ratios, spread
from jaxserve.bench.report import Figure, Report, Target
from jaxserve.engine.progress import Progress

TARGET = Target(limit=0.4, is_floor=False)
READY = re.compile(r"ready on (http://\S+)")
PROMPT = "The capital of France is"
COMMAND = (sys.executable, "-c", "from jaxserve.cli.main import run; run()", "serve")
"""What the `jaxserve` script runs, with this interpreter."""


@dataclass(frozen=True, kw_only=True)
class Start:
    """Seconds from the process's start until the server was healthy and until its first token came, and its resident
    memory once that request was answered: all of it, and without the pages of files such as libraries. None where the
    system does not tell."""

    healthy_seconds: float
    first_token_seconds: float
    resident_bytes: int | None
    own_bytes: int | None


def bench_startup(
    arguments: Sequence[str],
    model_path: Path,
    progress: Progress,
    *,
    num_rounds: int,
    timeout_seconds: float,
    model: dict[str, Any],
    command: Sequence[str] = COMMAND,
) -> Report:
    """Rounds of a start with an empty compilation cache, then one with the cache the first has filled.

    arguments: the model and options of `jaxserve serve`, without --port and --compilation-cache-dir. model_path is read
    once before, so that both starts find it in memory.
    """
    read_once(model_path)
    with (
        tempfile.TemporaryDirectory(prefix="jaxserve-startup-") as folder,
        progress.task("startup", num_rounds) as done,
    ):

        def start(number: int) -> Start:
            cache = ("--port", "0", "--compilation-cache-dir", str(Path(folder) / str(number)))
            return start_once([*command, *arguments, *cache], timeout_seconds)

        rounds = interleaved({"first": start, "second": start}, num_rounds=num_rounds, num_warm_up=0, advance=done)
    first, second = ([s.first_token_seconds for s in rounds[name]] for name in ("first", "second"))
    healthy = {name: [s.healthy_seconds for s in rounds[name]] for name in rounds}
    memory = [
        Figure(name=f"second start, resident memory{which}", unit="MB", value=spread([n / 1e6 for n in sizes]))
        for which, field in (("", "resident_bytes"), (" without files", "own_bytes"))
        if None not in (sizes := [getattr(s, field) for s in rounds["second"]])
    ]
    return Report(
        title="startup",
        model=model,
        settings={"command": " ".join(["jaxserve serve", *arguments])},
        figures=(
            Figure(name="second start over first", unit="x", value=spread(paired_ratios(second, first)), target=TARGET),
            Figure(name="first start, to the first token", unit="s", value=spread(first)),
            Figure(name="second start, to the first token", unit="s", value=spread(second)),
            Figure(name="first start, to healthy", unit="s", value=spread(healthy["first"])),
            Figure(name="second start, to healthy", unit="s", value=spread(healthy["second"])),
            *memory,
        ),
        notes=(
            "the first start has an empty compilation cache; model file and Python are in the page cache",
            "memory is read when one request has been answered",
        ),
    )


def read_once(path: Path) -> None:
    """Brings the model's files into the system's page cache."""
    for file in [path] if path.is_file() else sorted(path.rglob("*")):
        if not file.is_file():
            continue
        with file.open("rb") as content:
            while content.read(1 << 24):
                pass


def start_once(command: Sequence[str], timeout_seconds: float) -> Start:
    """Starts a server, asks it for one token, and ends it with SIGTERM.

    Raises BenchmarkFailed, with the end of its stderr, when any of that goes wrong or the exit code is not 0.
    """
    with tempfile.TemporaryFile() as errors:
        begin = time.perf_counter()
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
        try:
            url = _ready_url(process, begin + timeout_seconds)
            healthy = _when_healthy(url, begin + timeout_seconds)
            first_token = _first_token(url, begin + timeout_seconds)
            resident_bytes, own_bytes = resident_memory(Path(f"/proc/{process.pid}/status"))
            process.send_signal(signal.SIGTERM)
            code = process.wait(timeout_seconds)
            if code != 0:
                raise BenchmarkFailed(f"the server ended with exit code {code} after SIGTERM, expected 0")
        except (BenchmarkFailed, httpx.HTTPError, subprocess.TimeoutExpired) as error:
            raise BenchmarkFailed(f"{' '.join(command)}: {error}; its stderr ended: {_tail(errors)}") from error
        finally:
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()
    return Start(
        healthy_seconds=healthy - begin,
        first_token_seconds=first_token - begin,
        resident_bytes=resident_bytes,
        own_bytes=own_bytes,
    )


def resident_memory(status: Path) -> tuple[int | None, int | None]:
    """Resident bytes of a process by its file in /proc, all and without those of files; None where there is no such
    file."""
    if not status.exists():
        return None, None
    found = dict(re.findall(r"^(VmRSS|RssFile):\s+(\d+) kB$", status.read_text(), re.MULTILINE))
    total, files = int(found["VmRSS"]) * 1024, int(found["RssFile"]) * 1024
    return total, total - files


def _ready_url(process: subprocess.Popen[str], deadline: float) -> str:
    """The address in the readiness line on stdout."""
    found: list[str] = []
    assert process.stdout is not None
    stdout = process.stdout

    def read() -> None:
        for line in stdout:
            match = READY.search(line)
            if match:
                found.append(match[1])
                return

    reader = threading.Thread(target=read)
    reader.start()
    reader.join(max(0.0, deadline - time.perf_counter()))
    if reader.is_alive():
        process.kill()  # closes the pipe, which ends the reader
        reader.join()
        raise BenchmarkFailed("not ready in time")
    if not found:
        raise BenchmarkFailed(f"the server ended with exit code {process.wait()} before it was ready")
    return found[0]


def _when_healthy(url: str, deadline: float) -> float:
    """When /health first said 200."""

    def is_healthy() -> bool:
        return httpx.get(f"{url}/health", trust_env=False, timeout=10).status_code == 200

    return _when(is_healthy, deadline, "/health never said 200")


def _when(is_true: Callable[[], bool], deadline: float, failure: str) -> float:
    while not is_true():
        if time.perf_counter() > deadline:
            raise BenchmarkFailed(failure)
        time.sleep(0.01)
    return time.perf_counter()


def _first_token(url: str, deadline: float) -> float:
    """When the first event of a streamed completion came; the stream is then read to its end."""
    body = {"prompt": PROMPT, "max_tokens": 2, "temperature": 0, "ignore_eos": True, "stream": True}
    body["model"] = httpx.get(f"{url}/v1/models", trust_env=False, timeout=10).json()["data"][0]["id"]
    timeout = max(1.0, deadline - time.perf_counter())
    first = None
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=timeout, trust_env=False) as response:
        if response.status_code != 200:
            raise BenchmarkFailed(f"the completion was answered with HTTP {response.status_code}: {response.read()!r}")
        for line in response.iter_lines():
            if line.startswith("data:") and first is None:
                first = time.perf_counter()
                if '"choices"' not in line:
                    raise BenchmarkFailed(f"the completion began with {line!r:.300}")
    if first is None:
        raise BenchmarkFailed("the completion had no event")
    return first


def _tail(errors: IO[bytes]) -> str:
    errors.seek(0)
    return " ".join(errors.read().decode(errors="replace").split())[-600:] or "(empty)"
