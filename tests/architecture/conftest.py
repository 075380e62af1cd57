"""Where the project lies and how its Python files read."""

import ast
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("jaxserve", "pallas_kernels", "sharding", "checkpoints")


@dataclass(frozen=True, kw_only=True)
class SourceFile:
    """One Python file of the four packages. name: its path from the root, as messages show it."""

    name: str
    num_lines: int
    tree: ast.Module

    @property
    def is_kernel(self) -> bool:
        return self.name.startswith("pallas_kernels/")


@pytest.fixture(scope="session")
def root() -> Path:
    """The clone's top folder."""
    return ROOT


@pytest.fixture(scope="session")
def source_files() -> list[SourceFile]:
    """Every Python file of the four packages, parsed."""
    paths = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
    assert len(paths) >= len(PACKAGES)
    return [_read(path) for path in paths]


def _read(path: Path) -> SourceFile:
    text = path.read_text()
    return SourceFile(
        name=path.relative_to(ROOT).as_posix(), num_lines=len(text.splitlines()), tree=ast.parse(text, str(path))
    )
