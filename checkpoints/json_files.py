"""JSON objects out of files that are not trusted: bounded in size, no key twice, errors that name the file."""

import json
from pathlib import Path
from typing import Any

from checkpoints.errors import CheckpointError


def read_json_object(path: Path, *, max_bytes: int) -> dict[str, Any]:
    """The JSON object in a file of at most `max_bytes`; CheckpointError if it holds anything else."""
    try:
        num_bytes = path.stat().st_size
        if num_bytes > max_bytes:
            raise CheckpointError(f"{path}: has {num_bytes:,} bytes, at most {max_bytes:,} are allowed")
        text = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from None
    return parse_json_object(text, where=str(path))


def parse_json_object(text: bytes, *, where: str) -> dict[str, Any]:
    """A JSON object in which no key occurs twice; CheckpointError, starting with `where`, for anything else."""
    try:
        content = json.loads(text, object_pairs_hook=_unique)
    except (RecursionError, ValueError) as error:  # JSONDecodeError and UnicodeDecodeError are ValueErrors
        raise CheckpointError(f"{where}: is no JSON that can be read: {error}") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{where}: is no JSON object")
    return content


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        raise ValueError("a key occurs twice")
    return table
