"""Writes a GGUF file of another one's metadata, byte for byte, and some of its tensors."""

import struct
from collections.abc import Iterable
from pathlib import Path

from checkpoints.gguf import DEFAULT_ALIGNMENT, GGUFFile
from checkpoints.tensors import GGUF_TYPE_NAMES

_COUNT_OFFSET = 8  # behind magic and version
_TYPE_NUMBERS = {name: number for number, name in GGUF_TYPE_NAMES.items()}


def write_gguf_part(file: GGUFFile, tensor_names: Iterable[str], path: Path) -> None:
    """A GGUF file at `path` with the metadata of `file` and these of its tensors."""
    alignment = file.metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    head = bytearray(file.before_tensors())
    names = sorted(tensor_names)
    struct.pack_into("<Q", head, _COUNT_OFFSET, len(names))
    body = bytearray()
    for name in names:
        info, encoded = file.tensors[name], name.encode()
        body += b"\0" * (-len(body) % alignment)
        head += struct.pack("<Q", len(encoded)) + encoded
        head += struct.pack(f"<I{len(info.shape)}Q", len(info.shape), *info.shape[::-1])
        head += struct.pack("<IQ", _TYPE_NUMBERS[info.format], len(body))
        body += file.raw(name).tobytes()
    path.write_bytes(head + b"\0" * (-len(head) % alignment) + body)
