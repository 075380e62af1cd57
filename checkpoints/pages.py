"""Pages of a mapped file: asked for ahead of their use, and given back after it."""

import mmap

from checkpoints.tensors import TensorInfo

STEP_BYTES = 128 << 10  # Linux reads no more for one call than a device's read-ahead, which is rarely less than this


def ask_for_pages(mapping: mmap.mmap, info: TensorInfo) -> None:
    """Has the system read a tensor's bytes into its cache while other work goes on; nothing where it cannot."""
    if not hasattr(mmap, "MADV_WILLNEED"):
        return
    start, end = _pages(mapping, info)
    for step in range(start, end, STEP_BYTES):
        mapping.madvise(mmap.MADV_WILLNEED, step, min(STEP_BYTES, end - step))


def release_pages(mapping: mmap.mmap, info: TensorInfo) -> None:
    """A tensor's pages stop counting as memory of this process; the system's cache keeps them while it has room.

    Views stay valid: what is touched again is read again.
    """
    if not hasattr(mmap, "MADV_DONTNEED"):
        return
    start, end = _pages(mapping, info)
    if end > start:
        mapping.madvise(mmap.MADV_DONTNEED, start, end - start)


def _pages(mapping: mmap.mmap, info: TensorInfo) -> tuple[int, int]:
    """The whole pages that hold a tensor, also parts of its neighbours."""
    start = info.offset // mmap.PAGESIZE * mmap.PAGESIZE
    return start, min(info.offset + info.num_bytes, len(mapping))
