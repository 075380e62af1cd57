"""Fixture weights as they lie in the repository, a sixth smaller, and how tests get at them.

`model.safetensors.planes.xz` is model.safetensors with byte 0 of every four first, then byte 1, and so on (exponents
of float32 values repeat, their other bytes do not), as xz. `python tests/fixture_files.py FILE...` makes them.
"""

import lzma
import os
import sys
from pathlib import Path

import numpy as np

FIXTURES = Path(__file__).resolve().parent / "fixtures"
SUFFIX = ".planes.xz"
LOGIT_STEP = 2.0**-12  # golden logits kept as int16 are multiples of it: at most 1.3e-4 from the reference's


def pack(path: Path) -> None:
    """Writes the packed file beside a file of weights."""
    content = np.fromfile(path, np.uint8)
    planes = np.pad(content, (0, -len(content) % 4)).reshape(-1, 4).T
    head = len(content).to_bytes(8, "little")
    path.with_name(path.name + SUFFIX).write_bytes(lzma.compress(head + planes.tobytes(), preset=9))


def unpack_all(folder: Path = FIXTURES) -> None:
    """Every packed file's weights beside it, where they are not yet there, or older."""
    for packed in folder.rglob(f"*{SUFFIX}"):
        target = packed.with_name(packed.name.removesuffix(SUFFIX))
        if target.exists() and target.stat().st_mtime >= packed.stat().st_mtime:
            continue
        content = lzma.decompress(packed.read_bytes())
        planes = np.frombuffer(content, np.uint8, offset=8).reshape(4, -1)
        part = target.with_name(f"{target.name}.{os.getpid()}.part")
        part.write_bytes(planes.T.tobytes()[: int.from_bytes(content[:8], "little")])
        part.replace(target)


def golden_logits(stored: np.ndarray) -> np.ndarray:
    """Logits of a golden file in float32."""
    return stored if stored.dtype == np.float32 else stored.astype(np.float32) * np.float32(LOGIT_STEP)


if __name__ == "__main__":
    for name in sys.argv[1:]:
        pack(Path(name))
