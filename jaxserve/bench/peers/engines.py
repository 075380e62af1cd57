"""An engine in a child process: started once, asked over pipes, idle in between. Which engines are known, and how."""

import json
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxserve.bench.peers.own_engine import COMMAND
from jaxserve.errors import ConfigError, JaxserveError

OWN = "jaxserve"
SCRIPTS = Path(__file__).parent / "scripts"
TICKS_PER_SECOND = 100  # USER_HZ, the same on every Linux this runs on


class EngineUnusable(JaxserveError):
    """Why an engine gives no figures, in one line."""


@dataclass(frozen=True, kw_only=True)
class Peer:
    """Another engine: the module in `scripts` that runs it, and what to install for it."""

    module: str
    packages: str


PEERS = {
    "llama.cpp": Peer(module="llama_cpp_engine", packages="llama-cpp-python"),
    "openvino": Peer(module="openvino_engine", packages="openvino-genai"),
    "transformers": Peer(module="transformers_engine", packages="transformers torch gguf accelerate"),
}


@dataclass(frozen=True, kw_only=True)
class EngineCommand:
    """How an engine's process is started. packages: what is missing when an import fails in it."""

    name: str
    command: tuple[str, ...]
    packages: str = ""


def own_command() -> EngineCommand:
    """jaxserve with this interpreter."""
    return EngineCommand(name=OWN, command=(sys.executable, "-c", COMMAND))


def peer_commands(names: Sequence[str], pythons: dict[str, str]) -> list[EngineCommand]:
    """The named peers, each with its interpreter or this one. Raises ConfigError for a name that is not known."""
    if unknown := [name for name in (*names, *pythons) if name not in PEERS]:
        raise ConfigError(f"no peer {unknown[0]!r}; there are {', '.join(PEERS)} (--peers, --peer-python NAME=PATH)")
    if unused := sorted(set(pythons) - set(names)):
        raise ConfigError(f"--peer-python names {unused[0]}, which --peers leaves out")
    return [peer_command(name, pythons.get(name, sys.executable)) for name in names]


def peer_command(name: str, python: str) -> EngineCommand:
    """One peer under an interpreter."""
    peer = PEERS[name]
    command = (python, str(SCRIPTS / "exchange.py"), peer.module)
    return EngineCommand(name=name, command=command, packages=peer.packages)


class EngineProcess:
    """A child that answers as `scripts/exchange.py` says. Every failure is EngineUnusable and ends the child."""

    def __init__(self, command: EngineCommand) -> None:
        self._packages = command.packages
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  (closed by `close`)
        try:
            self._process = subprocess.Popen(
                command.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True
            )
        except OSError as error:
            self._errors.close()
            raise EngineUnusable(f"{command.command[0]}: {error.strerror}") from error

    def ask(self, what: str, timeout_seconds: float, **content: Any) -> dict[str, Any]:
        """The answer to one request. Raises EngineUnusable for an error, a crash, or no answer in time."""
        if self._errors.closed:
            raise EngineUnusable(f"closed before {what!r}")
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        late = threading.Timer(timeout_seconds, self._process.kill)  # ends the pipe, and readline with it
        late.start()
        try:
            self._process.stdin.write(json.dumps({"ask": what, **content}) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        was_late = not late.is_alive()
        late.cancel()
        if not line:
            raise EngineUnusable(self._end(what, timeout_seconds if was_late else None))
        return self._checked(line)

    def _checked(self, line: str) -> dict[str, Any]:
        """What stands in an answer. Raises EngineUnusable for anything but a good one."""
        try:
            reply: dict[str, Any] = json.loads(line)
        except ValueError:
            reply = {"error": f"answered {line.strip()[:80]!r} instead of JSON"}
        if "missing" in reply:
            self.close()
            hint = f": pip install {self._packages}" if self._packages else f" (no module {reply['missing']})"
            raise EngineUnusable(f"not installed{hint}")
        if "error" in reply:
            self.close()
            raise EngineUnusable(reply["error"])
        return reply["ok"]

    def cpu_seconds(self) -> float | None:
        """What the process has used so far, in user and system mode; None where the system does not say."""
        try:
            fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return None
        return (int(fields[11]) + int(fields[12])) / TICKS_PER_SECOND

    def close(self) -> None:
        """Ends the child: its input ends, and when it does not leave it is killed. More than once is fine."""
        if self._errors.closed:
            return
        self._process.kill()  # it holds nothing that outlives it, and an engine's threads may not end on their own
        self._process.communicate()
        self._errors.close()

    def _end(self, what: str, timeout_seconds: float | None) -> str:
        """Why there was no answer."""
        self._process.kill()
        code = self._process.wait()
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        self.close()
        if timeout_seconds is not None:
            return f"no answer to {what!r} in {timeout_seconds:g} s"
        return f"its process ended with {code} at {what!r}: {lines[-1][-200:] if lines else 'nothing on stderr'}"


def machine_cpu_seconds() -> float | None:
    """What all processes of the machine have used, in user and system mode; None where the system does not say."""
    try:
        fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()
    except OSError:
        return None
    user, nice, system = map(int, fields[1:4])
    return (user + nice + system) / TICKS_PER_SECOND
