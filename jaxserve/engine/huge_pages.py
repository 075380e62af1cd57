"""Large buffers of a CPU in huge pages.

Attention reads scattered pages of a cache of hundreds of megabytes; in the kernel's 4 KB pages most reads then wait for
an address translation first. Linux's madvise moves a buffer that exists into pages of 2 MB.
"""

import ctypes
import sys
from typing import Any

import jax

_HUGE = 2 * 2**20
_MADV_HUGEPAGE, _MADV_COLLAPSE = 14, 25  # the second from Linux 6.1 on; before, the kernel collapses in its own time


def in_huge_pages(tree: Any) -> int:
    """Moves the large arrays of a tree on the CPU; returns how many bytes now lie in huge pages.

    0 where the system has no such call or no such memory: what works in small pages goes on to work.
    """
    if not sys.platform.startswith("linux"):
        return 0
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return sum(_move(madvise, leaf) for leaf in jax.tree.leaves(jax.block_until_ready(tree)))


def _move(madvise: Any, array: jax.Array) -> int:
    start = array.unsafe_buffer_pointer()
    first, end = -(-start // _HUGE) * _HUGE, (start + array.nbytes) // _HUGE * _HUGE
    if end <= first or madvise(first, end - first, _MADV_HUGEPAGE) != 0:
        return 0
    return end - first if madvise(first, end - first, _MADV_COLLAPSE) == 0 else 0
