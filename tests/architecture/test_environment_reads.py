"""No environment variable is read below the command line: what a library does follows from its arguments."""

import ast

import pytest

READERS = {"environ", "environb", "getenv", "getenvb"}
# path -> why it may. Empty is the aim.
ALLOWED: dict[str, str] = {
    "jaxserve/offline.py": "LLM is where a notebook starts; it finds models where `jaxserve pull` put them",
}


def test_only_the_command_line_reads_the_environment(source_files):
    below = [file for file in source_files if not file.name.startswith("jaxserve/cli/")]
    found = [f"{file.name}:{line}" for file in below if file.name not in ALLOWED for line in _reads(file.tree)]
    assert found == []


def test_every_exception_is_still_needed(source_files):
    reading = {file.name for file in source_files if _reads(file.tree)}
    assert set(ALLOWED) <= reading


@pytest.mark.parametrize(
    "code", ["import os\nos.environ['A']", "import os as o\n\no.getenv('A')", "from os import environ as e"]
)
def test_reads_are_seen(code):
    assert _reads(ast.parse(code)) == [len(code.splitlines())]


def test_other_uses_of_os_are_not():
    assert _reads(ast.parse("import os\nos.path.join('a', 'b')\nfrom os import fspath")) == []


def _reads(tree: ast.Module) -> list[int]:
    """Lines that name os.environ, os.getenv or their bytes forms, however os was imported."""
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom | ast.Attribute)]
    return sorted(node.lineno for node in nodes if _is_read(node))


def _is_read(node: ast.ImportFrom | ast.Attribute) -> bool:
    if isinstance(node, ast.Attribute):
        return node.attr in READERS
    return node.module == "os" and any(alias.name in READERS for alias in node.names)
