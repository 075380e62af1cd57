"""How the memory of a host is laid out and kept where a CPU runs the model.

A decode step reads all weights and scattered pages of the cache. In the system's 4 KB pages most reads then wait for an
address translation first, and the CPU's own prefetching ends at every page. Linux offers pages of 2 MB on request.
A step's temporary buffers are allocated anew each time; what the C library gives back to the system in between comes
back page by page, each with a fault and zeros.
"""

import ctypes
import mmap
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

_LIBC = ctypes.CDLL(None)
_HUGE = 2 * 2**20
_LINE = 64  # XLA takes a buffer of the host as its own only when it starts on a cache line
_LARGEST_INT = 2**31 - 1
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # of glibc's malloc.h
_ARENA_BYTES = 64 * 2**20  # glibc's limit for the area of a thread that is not the first
_LARGEST_MMAP_THRESHOLD = 2**30
_MADV_DONTNEED = 4
_MAPPING = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) r-[x-]p \S+ \S+ \S+ +(/.*\.so[.0-9]*)$")
_MADV_HUGEPAGE, _MADV_COLLAPSE = 14, 25  # the second from Linux 6.1 on; before, the system does it in its own time


def prepare_allocator(largest_bytes: int) -> None:
    """Lets all threads allocate from one area where a thread's own is too small for buffers of this size, which would
    then be mapped and faulted in anew each time. Before jax starts its threads; glibc only.

    Not for smaller ones: threads that share an area wait for each other, a tenth of the time of a small step.
    """
    if largest_bytes > _ARENA_BYTES // 4:
        _mallopt({_M_ARENA_MAX: 1})


def keep_freed_memory() -> bool:
    """Makes this process keep what it frees from now on for its next allocations, also large buffers; whether it does.

    What loading left is given back first. Holds for the whole process; only glibc has the calls.
    """
    if sys.platform.startswith("linux") and hasattr(_LIBC, "malloc_trim"):
        _LIBC.malloc_trim(0)
    return _mallopt({_M_MMAP_THRESHOLD: _LARGEST_MMAP_THRESHOLD, _M_TRIM_THRESHOLD: _LARGEST_INT})


def unmap_unused_code(mappings: Path = Path("/proc/self/smaps")) -> None:
    """Takes the pages of shared libraries out of this process; those it still runs come back at their next use.

    Start-up runs through much code that serving never needs, LLVM's for one. The pages are the files' own, clean and
    in the system's page cache: coming back costs a short fault each and no reading.
    """
    if mappings.exists():
        for start, num_bytes in _clean_code(mappings.read_text(errors="replace")):
            _advise(start, num_bytes, _MADV_DONTNEED)


def _clean_code(smaps: str) -> Iterator[tuple[int, int]]:
    """Start and size of read-only mappings of libraries. One with a page of its own is left out: what the loader wrote
    there would be lost."""
    found = None
    for line in smaps.splitlines():
        if "-" in line.split(" ", 1)[0]:
            found = _MAPPING.match(line)
        elif found and line.startswith("Anonymous:") and int(line.split()[1]) == 0:
            start, end = int(found[1], 16), int(found[2], 16)
            yield start, end - start


def _mallopt(options: dict[int, int]) -> bool:
    """Whether the C library took all options."""
    if not sys.platform.startswith("linux") or not hasattr(_LIBC, "mallopt"):
        return False
    taken = [_LIBC.mallopt(option, value) == 1 for option, value in options.items()]
    return all(taken)


def one_after_another(tree: Any) -> Any:
    """The tree with its arrays on the CPU copied into one area of huge pages, where small ones find room too."""
    leaves, structure = jax.tree.flatten(tree)
    sizes = [-(-leaf.nbytes // _LINE) * _LINE for leaf in leaves]
    area = np.frombuffer(mmap.mmap(-1, sum(sizes) + 2 * _HUGE), np.uint8)
    area = area[-area.ctypes.data % _HUGE :]
    _advise(area.ctypes.data, area.nbytes // _HUGE * _HUGE, _MADV_HUGEPAGE)
    moved, start = [], 0
    for leaf, size in zip(leaves, sizes, strict=True):
        place = area[start : start + leaf.nbytes].view(leaf.dtype).reshape(leaf.shape)
        place[...] = np.asarray(leaf)
        moved.append(jax.device_put(place, may_alias=True))
        start += size
    return jax.tree.unflatten(structure, moved)


def in_huge_pages(tree: Any) -> int:
    """Moves the large arrays of a tree on the CPU, where they are, into huge pages; returns the bytes that now are.

    0 where the system has no such call or no such memory: what works in small pages goes on to work.
    """
    return sum(_moved_bytes(leaf) for leaf in jax.tree.leaves(jax.block_until_ready(tree)))


def _moved_bytes(array: jax.Array) -> int:
    start = array.unsafe_buffer_pointer()
    first, end = -(-start // _HUGE) * _HUGE, (start + array.nbytes) // _HUGE * _HUGE
    if end <= first or not _advise(first, end - first, _MADV_HUGEPAGE):
        return 0
    return end - first if _advise(first, end - first, _MADV_COLLAPSE) else 0


def _advise(start: int, num_bytes: int, advice: int) -> bool:
    """Whether the system took the advice."""
    if not sys.platform.startswith("linux"):
        return False
    madvise = _LIBC.madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return madvise(start, num_bytes, advice) == 0
