"""Modules, classes and functions carry the field's words (STYLE: Names)."""

import ast
import re
from pathlib import PurePosixPath

import pytest

VAGUE = {"manager", "helper", "util", "utility", "common", "misc", "base", "mixin", "handler"}
VAGUE |= {f"{word}s" for word in VAGUE} | {"utilities"}
VAGUE_VERBS = ("process_", "do_")


def test_modules_say_what_they_hold(source_files):
    parts = {part for file in source_files for part in PurePosixPath(file.name).with_suffix("").parts}
    assert {part for part in parts if _is_vague(part)} == set()


def test_classes_say_what_they_are(source_files):
    found = [
        f"{file.name}:{node.name}"
        for file in source_files
        for node in ast.walk(file.tree)
        if isinstance(node, ast.ClassDef) and _is_vague(node.name)
    ]
    assert found == []


def test_functions_say_what_they_do(source_files):
    found = [
        f"{file.name}:{node.name}"
        for file in source_files
        for node in ast.walk(file.tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.lstrip("_").startswith(VAGUE_VERBS)
    ]
    assert found == []


@pytest.mark.parametrize("name", ["page_manager", "CacheManager", "_Base", "string_utils", "HTTPHandler", "misc"])
def test_vague_names_are_seen(name):
    assert _is_vague(name)


@pytest.mark.parametrize("name", ["database", "Basement", "commonwealth", "PagePool", "__init__"])
def test_other_names_are_not(name):
    assert not _is_vague(name)


def _is_vague(name: str) -> bool:
    words = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)
    return any(word.lower() in VAGUE for word in words)
