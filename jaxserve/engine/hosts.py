"""Several hosts that run one model: they find each other, and host 0 tells the others what to run.

Every host runs the same programs in the same order, each with its devices' parts (multi-controller JAX). Host 0 alone
schedules; before it starts a program it sends what goes into it over a connection to each other host. Whoever loses a
connection says which host is gone and ends the process, because a program that waits for a lost device never ends.
"""

import hashlib
import json
import os
import queue
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import jax
import numpy as np

from jaxserve.errors import ConfigError, JaxserveError

MAGIC = b"jaxserve hosts 1\n"
MAX_HEADER_BYTES = 1 << 16
RETRY_SECONDS = 0.2
# A host that the network lost is noticed after 5 + 3 * 3 seconds.
_KEEP_ALIVE = ((socket.TCP_KEEPIDLE, 5), (socket.TCP_KEEPINTVL, 3), (socket.TCP_KEEPCNT, 3))
_LENGTH = struct.Struct("<I")
_FAREWELL = b"."

type Arrays = Sequence[np.ndarray]


@dataclass(frozen=True, kw_only=True)
class HostOptions:
    """coordinator: HOST:PORT of host 0, where PORT is for our connections and PORT + 1 for JAX's."""

    coordinator: str
    num_hosts: int
    host_id: int
    timeout_seconds: float

    @property
    def address(self) -> tuple[str, int]:
        """Host and port. ConfigError for anything else."""
        host, _, port = self.coordinator.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 65535:
            raise ConfigError(f"--coordinator {self.coordinator!r:.80}: expected HOST:PORT of host 0, as 10.0.0.1:9000")
        return host.strip("[]"), int(port)


class Leader:
    """Host 0's end: the connections to all others."""

    def __init__(self, connections: dict[int, socket.socket], leave: Callable[[str], None]) -> None:
        self._connections, self._leave = connections, leave
        self._is_closed = False
        for host, connection in connections.items():
            threading.Thread(target=self._watch, args=(host, connection), daemon=True, name=f"host-{host}").start()

    def tell(self, name: str, *arrays: np.ndarray) -> None:
        """Has all other hosts run something, before this one does; "close" lets them end."""
        if name == "close" and self._is_closed:
            return
        self._is_closed = self._is_closed or name == "close"
        message = _message(name, arrays)
        for host, connection in self._connections.items():
            try:
                connection.sendall(message)
            except OSError:
                self._leave(f"host {host} is gone; ending")

    def _watch(self, host: int, connection: socket.socket) -> None:
        said = b""
        with connection, suppress(OSError):
            said = connection.recv(1)  # nothing until they end, and nothing at all where that is no orderly end
        if said != _FAREWELL:  # even after "close": JAX would wait for it at the exit
            self._leave(f"host {host} is gone; ending")


class Follower:
    """Another host's end: what host 0 says, in order."""

    def __init__(self, connection: socket.socket, leave: Callable[[str], None]) -> None:
        self._connection, self._leave = connection, leave
        self._told: queue.SimpleQueue[tuple[str, list[np.ndarray]]] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True, name="host-0").start()

    def told(self, name: str) -> list[np.ndarray]:
        """The next command's arrays, which must have this name."""
        found, arrays = self._told.get()
        if found != name:
            raise JaxserveError(f"host 0 said {found!r} where {name!r} was due")
        return arrays

    def commands(self) -> Iterator[tuple[str, list[np.ndarray]]]:
        """Names and arrays, until host 0 closes."""
        while (command := self._told.get())[0] != "close":
            yield command

    def _read(self) -> None:
        try:
            with self._connection:
                while True:
                    name, arrays = _received(self._connection)
                    self._told.put((name, arrays))
                    if name == "close":
                        self._connection.sendall(_FAREWELL)
                        return
        except (OSError, ValueError):
            self._leave("host 0 is gone; ending")


def join(options: HostOptions, agreement: dict[str, Any]) -> Leader | Follower:
    """Waits for all hosts, then starts JAX's distributed runtime over them.

    agreement: what must be the same on all of them. Raises JaxserveError, naming the hosts that did not come in time
    or were started otherwise.
    """
    digest = hashlib.sha256(json.dumps([metadata.version("jaxserve"), agreement], sort_keys=True, default=str).encode())
    hello = MAGIC + digest.digest()
    connect = _gathered if options.host_id == 0 else _connected
    found = connect(options, hello)
    host, port = options.address
    jax.distributed.initialize(
        f"{host}:{port + 1}",
        num_processes=options.num_hosts,
        process_id=options.host_id,
        initialization_timeout=max(10, int(options.timeout_seconds)),
    )
    return Leader(found, leave) if isinstance(found, dict) else Follower(found, leave)


def leave(reason: str) -> None:
    """Ends the process at once: threads may wait for devices that are gone."""
    print(f"jaxserve: error: {reason}", file=sys.stderr, flush=True)
    os._exit(1)


def _gathered(options: HostOptions, hello: bytes) -> dict[int, socket.socket]:
    """Host 0: a connection to each other host."""
    deadline = time.monotonic() + options.timeout_seconds
    missing, found = set(range(1, options.num_hosts)), {}
    try:
        listener = socket.create_server(("", options.address[1]), reuse_port=False)
    except OSError as error:
        raise ConfigError(f"--coordinator {options.coordinator}: cannot listen there: {error.strerror}") from error
    with listener, ExitStack() as opened:
        while missing:
            listener.settimeout(max(0.01, deadline - time.monotonic()))
            try:
                connection = listener.accept()[0]
            except TimeoutError:
                names = ", ".join(map(str, sorted(missing)))
                raise JaxserveError(
                    f"host {names} of {options.num_hosts} did not come within {options.timeout_seconds:g} s"
                ) from None
            host = _greeted(opened.enter_context(connection), hello, options)
            if host in missing:
                missing.remove(host)
                found[host] = connection
            elif host is not None:
                raise JaxserveError(f"a second host came with --host-id {host}")
        for connection in found.values():
            connection.sendall(b"+")
        opened.pop_all()
    return found


def _greeted(connection: socket.socket, hello: bytes, options: HostOptions) -> int | None:
    """The id of the host that called; None for a stranger. JaxserveError for one that was started otherwise."""
    connection.settimeout(5)
    try:
        said = _exactly(connection, len(hello) + _LENGTH.size)
    except OSError:
        connection.close()
        return None
    if not said.startswith(MAGIC):
        connection.close()
        return None
    (host,) = _LENGTH.unpack(said[-_LENGTH.size :])
    if said[: len(hello)] != hello or not 0 < host < options.num_hosts:
        with suppress(OSError):
            connection.sendall(b"-")
        raise JaxserveError(f"host {host} was started with other options or another version of jaxserve than host 0")
    _settled(connection)
    return host


def _connected(options: HostOptions, hello: bytes) -> socket.socket:
    """Any other host: the connection to host 0, once all are there."""
    deadline = time.monotonic() + options.timeout_seconds
    while True:
        try:
            connection = socket.create_connection(options.address, timeout=5)
            break
        except OSError as error:
            if time.monotonic() > deadline:
                raise JaxserveError(
                    f"host 0 at {options.coordinator} did not answer within {options.timeout_seconds:g} s: {error}"
                ) from error
            time.sleep(RETRY_SECONDS)
    connection.sendall(hello + _LENGTH.pack(options.host_id))
    connection.settimeout(options.timeout_seconds + 5)
    try:
        answer = connection.recv(1)
    except OSError:
        answer = b""
    if answer != b"+":
        connection.close()
        reason = "was started with other options or another version" if answer == b"-" else "gave up waiting for others"
        raise JaxserveError(f"host 0 at {options.coordinator} {reason}")
    _settled(connection)
    return connection


def _settled(connection: socket.socket) -> None:
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEP_ALIVE:
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


def _message(name: str, arrays: Arrays) -> bytes:
    """Length of the header, header, values."""
    header = json.dumps([name, [[str(array.dtype), list(array.shape)] for array in arrays]]).encode()
    return b"".join([_LENGTH.pack(len(header)), header, *(np.ascontiguousarray(array).tobytes() for array in arrays)])


def _received(connection: socket.socket) -> tuple[str, list[np.ndarray]]:
    (length,) = _LENGTH.unpack(_exactly(connection, _LENGTH.size))
    if length > MAX_HEADER_BYTES:
        raise ValueError(f"a header of {length} bytes")
    name, kinds = json.loads(_exactly(connection, length))
    arrays = []
    for dtype, shape in kinds:
        size = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
        arrays.append(np.frombuffer(_exactly(connection, size), dtype).reshape(shape))
    return name, arrays


def _exactly(connection: socket.socket, count: int) -> bytes:
    parts, left = [], count
    while left:
        part = connection.recv(left)
        if not part:
            raise ConnectionResetError("the connection ended")
        parts.append(part)
        left -= len(part)
    return b"".join(parts)
