"""What pip installs and what a source archive holds: our four packages, whole."""

import os
import shutil
import tarfile
import zipfile
from pathlib import Path

import hatchling.build
import pytest

PACKAGES = {"jaxserve", "pallas_kernels", "sharding", "checkpoints"}


@pytest.fixture
def in_root(root: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The clone as working folder, which is how a build frontend calls hatchling."""
    monkeypatch.chdir(root)
    return root


def _package_files(root: Path) -> set[str]:
    """Every file of the four packages, code and data, as a path from the root."""
    found = {p.relative_to(root) for package in PACKAGES for p in (root / package).rglob("*") if p.is_file()}
    return {path.as_posix() for path in found if "__pycache__" not in path.parts}


def test_the_wheel_holds_our_packages_and_nothing_else(in_root, tmp_path):
    with zipfile.ZipFile(tmp_path / hatchling.build.build_wheel(str(tmp_path))) as wheel:
        names = set(wheel.namelist())
    info = {name for name in names if name.split("/")[0].endswith(".dist-info")}
    assert {name.split("/")[0] for name in names - info} == PACKAGES
    assert names - info == _package_files(in_root)
    assert len({name.split("/")[0] for name in info}) == 1
    assert any(name.endswith("licenses/LICENSE") for name in info)


def test_both_archives_hold_kernels_made_ahead(root, monkeypatch, tmp_path):
    """Git ignores them; a wheel is built from the source archive. In a copy, as the clone may hold real ones."""
    skips = shutil.ignore_patterns("__pycache__", "prebuilt")
    for package in PACKAGES:
        shutil.copytree(root / package, tmp_path / package, ignore=skips)
    for name in ("pyproject.toml", ".gitignore", "README.md", "LICENSE"):
        shutil.copy(root / name, tmp_path)
    wanted = "pallas_kernels/cpu/prebuilt/generic/kernel-0.o"
    (tmp_path / wanted).parent.mkdir(parents=True)
    (tmp_path / wanted).write_bytes(b"code")
    monkeypatch.chdir(tmp_path)
    with zipfile.ZipFile(hatchling.build.build_wheel(str(tmp_path))) as wheel:
        assert wanted in wheel.namelist()
    with tarfile.open(hatchling.build.build_sdist(str(tmp_path))) as archive:
        assert any(name.endswith(wanted) for name in archive.getnames())


def test_the_source_archive_holds_our_packages_and_their_tests(in_root, tmp_path):
    with tarfile.open(tmp_path / hatchling.build.build_sdist(str(tmp_path))) as archive:
        names = {os.path.join(*Path(name).parts[1:]) for name in archive.getnames()}
    assert _package_files(in_root) <= names
    assert {"pyproject.toml", "LICENSE", "Makefile", "tests/conftest.py"} <= names
