"""Object files on disk, with a checksum in front: LLVM aborts the process on damaged code."""

import hashlib
import os
from pathlib import Path

_DIGEST_BYTES = 32


def read_object(path: Path) -> bytes | None:
    """The object code in a file; None when there is no file or it is damaged."""
    try:
        content = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    digest, object_code = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
    return object_code if hashlib.sha256(object_code).digest() == digest else None


def write_object(path: Path, object_code: bytes) -> None:
    """Readers see the whole file or none, also when several processes write it. Raises OSError."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        temporary.write_bytes(hashlib.sha256(object_code).digest() + object_code)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
