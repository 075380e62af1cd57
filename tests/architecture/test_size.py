"""Files and functions stay short enough to be one thought (STYLE: Size)."""

import ast

FILE_LINES, KERNEL_FILE_LINES = 400, 600
FUNCTION_LINES, KERNEL_FUNCTION_LINES = 60, 150


def test_files_are_short(source_files):
    too_long = [
        f"{file.name}: {file.num_lines} lines"
        for file in source_files
        if file.num_lines > (KERNEL_FILE_LINES if file.is_kernel else FILE_LINES)
    ]
    assert too_long == []


def test_functions_are_short(source_files):
    too_long = []
    for file in source_files:
        limit = KERNEL_FUNCTION_LINES if file.is_kernel else FUNCTION_LINES
        too_long += [f"{file.name}:{name}: {lines} lines" for name, lines in _functions(file.tree) if lines > limit]
    assert too_long == []


def test_a_long_function_is_seen():
    body = "\n".join(["def outer():", "    class Inner:", "        def long(self):", *["            pass"] * 60])
    assert list(_functions(ast.parse(body))) == [("outer", 63), ("long", 61)]


def _functions(tree: ast.Module):
    """(name, lines from `def` to the last line) of every function at any depth."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            yield node.name, node.end_lineno - node.lineno + 1
