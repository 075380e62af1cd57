"""The floor under a decode step on a CPU: every weight is read once, and memory gives so many bytes a second."""

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from checkpoints.load import open_weights

NUM_BYTES = 512 << 20  # far beyond any cache
NUM_PASSES = 3
EMBEDDING, OUTPUT = "token_embd.weight", "output.weight"


class ReadBandwidth:
    """Reads a large array with so many threads, as often as asked."""

    def __init__(self, num_threads: int, num_bytes: int = NUM_BYTES) -> None:
        self._parts = np.array_split(np.ones(num_bytes, np.uint8), num_threads)
        self._pool = ThreadPoolExecutor(num_threads)

    def bytes_per_second(self) -> float:
        """The best of some passes right now: what else runs on the machine only makes it less."""
        return max(self._one_pass() for _ in range(NUM_PASSES))

    def _one_pass(self) -> float:
        start = time.perf_counter()
        # Of numpy's reductions that of bytes is bound by memory alone, and it lets go of the interpreter's lock.
        list(self._pool.map(np.bitwise_or.reduce, self._parts))
        return sum(part.nbytes for part in self._parts) / (time.perf_counter() - start)

    def close(self) -> None:
        """Ends the threads and frees the array."""
        self._pool.shutdown()
        self._parts = []


def bytes_per_decode_step(path: Path) -> int:
    """Bytes of the GGUF file's tensors that one step of one sequence reads, if each is read once.

    All but an embedding table that is not the output matrix too: of that it reads one row. Too much for a model with
    experts, of which a token takes only some.
    """
    with open_weights(path) as source:
        sizes = {name: source.info(name).num_bytes for name in source.names()}
    if OUTPUT in sizes:
        sizes.pop(EMBEDDING, None)
    return sum(sizes.values())
