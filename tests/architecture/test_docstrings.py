"""Every public module says what it knows; the three outer packages say nothing more."""

import ast
from pathlib import PurePosixPath


def test_public_modules_have_docstrings(source_files):
    bare = [file.name for file in source_files if _is_public(file.name) and not ast.get_docstring(file.tree)]
    assert bare == []


def test_outer_packages_hold_a_docstring_only(source_files):
    outer = {f"{package}/__init__.py" for package in ("pallas_kernels", "sharding", "checkpoints")}
    statements = {file.name: len(file.tree.body) for file in source_files if file.name in outer}
    assert statements == dict.fromkeys(outer, 1)


def _is_public(name: str) -> bool:
    stem = PurePosixPath(name).stem
    return stem == "__init__" or not stem.startswith("_")
