"""No tracked file knows the machine it was written on or the host of a package registry."""

import shutil
import subprocess
from pathlib import Path

import pytest

# In two pieces each, so that this file does not hold what it looks for.
FORBIDDEN = (
    "/wor" + "k/",
    "/roo" + "t/",
    "/tmp/mod" + "els",
    "pypi.org/sim" + "ple",
    "pypi.org/py" + "pi",
    "files.python" + "hosted",
    "registry.npm" + "js",
)


@pytest.fixture(scope="module")
def tracked_files(root: Path) -> list[Path]:
    """The files git tracks or would track."""
    if shutil.which("git") is None or not (root / ".git").exists():
        pytest.skip("not a git clone, so nothing says which files belong to the project")
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=root, capture_output=True, check=True, text=True).stdout
    return [root / name for name in listed.split("\0") if name and (root / name).is_file()]


def test_no_machine_path_and_no_registry_host(tracked_files: list[Path]):
    assert any(path.name == "pyproject.toml" for path in tracked_files)
    assert [f"{path}: {found}" for path in tracked_files for found in _forbidden_in(path)] == []


def test_a_forbidden_word_is_seen(tmp_path: Path):
    (tmp_path / "a.toml").write_text(f'cache = "{FORBIDDEN[0]}cache"\n')
    assert list(_forbidden_in(tmp_path / "a.toml")) == [FORBIDDEN[0]]


def _forbidden_in(path: Path):
    """The forbidden words in a file; binary ones (fixtures) are looked into as well."""
    content = path.read_bytes()
    return (word for word in FORBIDDEN if word.encode() in content)
