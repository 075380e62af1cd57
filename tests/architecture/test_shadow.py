"""A foreign package under one of our three names gives one ImportError that says where it is."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from jaxserve._shadow import OWN_PACKAGES, require_own_packages

ASK = """
import sys
sys.path[:0] = {first!r}
import jaxserve
jaxserve.SamplingParams
try:
    jaxserve.CheckpointError
except ImportError as error:
    print(error)
else:
    print("accepted")
"""


def _ask(*first: Path) -> str:
    """What a fresh interpreter with these folders first on sys.path says to a name that needs our packages."""
    code = ASK.format(first=[str(folder) for folder in first])
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=first[0], check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def _package(folder: Path, name: str) -> Path:
    (folder / name).mkdir()
    (folder / name / "__init__.py").write_text("x = 1\n")
    return folder / name / "__init__.py"


@pytest.mark.parametrize("name", OWN_PACKAGES)
def test_a_foreign_package_is_named(tmp_path, root, name):
    intruder = _package(tmp_path, name)
    message = _ask(tmp_path, root)
    assert message.startswith(f"{intruder} hides jaxserve's own package {name!r}")
    assert "PYTHONPATH" in message


def test_a_foreign_module_is_named(tmp_path, root):
    (tmp_path / "checkpoints.py").write_text("x = 1\n")
    assert _ask(tmp_path, root).startswith(f"{tmp_path / 'checkpoints.py'} hides")


def test_a_folder_of_weights_is_no_package(tmp_path, root):
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "step-100.bin").write_bytes(b"\0")
    assert _ask(tmp_path, root) == "accepted"


def test_a_linked_clone_is_ours(tmp_path, root):
    (tmp_path / "clone").symlink_to(root)
    assert _ask(tmp_path / "clone") == "accepted"


def test_a_package_installed_over_ours_is_named(tmp_path, root):
    (tmp_path / "jaxserve").mkdir()
    for name in ("__init__.py", "_shadow.py", "errors.py", "sampling_params.py"):
        shutil.copy(root / "jaxserve" / name, tmp_path / "jaxserve" / name)
    shutil.copytree(root / "sharding", tmp_path / "sharding")
    overwritten = _package(tmp_path, "checkpoints")
    assert _ask(tmp_path).startswith(f"{overwritten} is not jaxserve's")


def test_a_missing_package_is_named(tmp_path, root):
    (tmp_path / "jaxserve").mkdir()
    for name in ("__init__.py", "_shadow.py", "errors.py", "sampling_params.py"):
        shutil.copy(root / "jaxserve" / name, tmp_path / "jaxserve" / name)
    assert "sharding" in _ask(tmp_path)


def test_a_package_imported_earlier_is_named(tmp_path, monkeypatch):
    module = type(sys)("sharding")
    module.__file__ = str(_package(tmp_path, "sharding"))
    monkeypatch.setitem(sys.modules, "sharding", module)
    with pytest.raises(ImportError, match="hides jaxserve's own package 'sharding'"):
        require_own_packages()


def test_our_own_packages_are_accepted():
    require_own_packages()
