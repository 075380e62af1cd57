"""The layers of `pyproject.toml` hold, name every module, and would notice a wrong import."""

import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

LINT = "from importlinter.cli import lint_imports_command; lint_imports_command()"


def _lint(folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", LINT, "--no-cache"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def test_imports_follow_the_layers(root):
    done = _lint(root)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_module_has_a_layer(root):
    contracts = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    named = {name for contract in contracts[:2] for layer in contract["layers"] for name in _modules(layer)}
    children = (root / "jaxserve").iterdir()
    present = {f"jaxserve.{c.stem}" for c in children if c.suffix == ".py" or (c / "__init__.py").exists()}
    assert present - named == {"jaxserve.__init__"}


def test_every_folder_of_code_is_a_package(root):
    """Import-linter does not look into a folder without `__init__.py`, so it would check nothing there."""
    packages = ("jaxserve", "checkpoints", "sharding", "pallas_kernels")
    folders = {path.parent for package in packages for path in (root / package).rglob("*.py")}
    assert [str(folder) for folder in sorted(folders) if not (folder / "__init__.py").exists()] == []


def test_both_layer_contracts_name_the_same_modules(root):
    contracts = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers, leaves = ({name for layer in c["layers"] for name in _modules(layer)} for c in contracts[:2])
    assert layers < leaves


@pytest.mark.parametrize(
    ("module", "statement", "broken"),
    [
        ("jaxserve/scheduler/__init__.py", "import numpy", "The scheduler is plain Python"),
        ("sharding/__init__.py", "import jaxserve.errors", "sharding imports no package of ours"),
        ("jaxserve/errors.py", "import sharding", "Leaves import nothing of ours"),
        ("jaxserve/layers.py", "import jaxserve.engine", "Each layer imports only from below"),
    ],
)
def test_a_wrong_import_is_seen(tmp_path, root, module, statement, broken):
    shutil.copy(root / "pyproject.toml", tmp_path)
    names = ["scheduler/__init__", "_shadow", "errors", "outputs", "sampling_params", "layers", "engine"]
    files = [*(f"jaxserve/{name}.py" for name in names), "jaxserve/__init__.py"]
    files += [f"{package}/__init__.py" for package in ("checkpoints", "sharding", "pallas_kernels")]
    for file in files:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(statement if file == module else "")
    done = _lint(tmp_path)
    assert done.returncode == 1
    assert any(broken in line and "BROKEN" in line for line in done.stdout.splitlines()), done.stdout


def _modules(layer: str) -> list[str]:
    return [name.strip(" ()") for name in layer.replace("|", ":").split(":")]
