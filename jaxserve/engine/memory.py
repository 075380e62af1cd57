"""How many KV pages there are: computed from the device's memory, never guessed."""

from dataclasses import dataclass
from typing import Any

from jaxserve.errors import ConfigError

DEVICE_SHARE = 0.9  # of an accelerator's memory, as vLLM's gpu_memory_utilization
HOST_SHARE = 0.125  # of the machine's memory on CPU, where other programs live too


@dataclass(frozen=True, kw_only=True)
class PageBudget:
    """Number of pages, their bytes, and why so many."""

    num_pages: int
    num_bytes: int
    reason: str


def page_budget(
    *,
    page_bytes: int,
    wanted_pages: int,
    num_pages: int | None,
    memory_bytes: int | None,
    free: tuple[int, str],
    total_bytes: int,
    column_pages: int = 1,
) -> PageBudget:
    """The pages to allocate: as the user says, else what memory gives, never more than could ever be used.

    wanted_pages: max_num_seqs sequences of max_model_len. free: bytes the device can spare, and how that was found.
    total_bytes: all of its memory, which nothing can exceed. column_pages: pages that hold the same tokens, one for
    each group of layers; num_pages are of them all.
    """
    num_pages = None if num_pages is None else num_pages * column_pages
    asked_bytes = num_pages * page_bytes if num_pages is not None else memory_bytes or 0
    if asked_bytes > total_bytes:
        flag = "--num-pages" if num_pages is not None else "--kv-cache-memory-bytes"
        raise ConfigError(f"{flag} asks for {asked_bytes:,} bytes and the device has {total_bytes:,}; ask for fewer")
    if num_pages is not None:
        reason = "--num-pages" if column_pages == 1 else f"--num-pages, for each of {column_pages} groups of layers"
        return PageBudget(num_pages=num_pages, num_bytes=num_pages * page_bytes, reason=reason)
    budget, reason = (memory_bytes, "--kv-cache-memory-bytes") if memory_bytes is not None else free
    fitting = budget // page_bytes
    if fitting < column_pages:
        raise ConfigError(
            f"no KV page fits: one page takes {column_pages * page_bytes:,} bytes and {budget:,} are left ({reason}); "
            "raise --kv-cache-memory-bytes or lower --page-size"
        )
    if wanted_pages <= fitting:
        reason = "enough for every sequence at full length"
        return PageBudget(num_pages=wanted_pages, num_bytes=wanted_pages * page_bytes, reason=reason)
    return PageBudget(num_pages=fitting, num_bytes=fitting * page_bytes, reason=f"as many as fit: {reason}")


def spare_bytes(device: Any, temp_bytes: int, host_memory_bytes: int) -> tuple[int, str]:
    """Bytes a cache may take on the device, and the sum behind the number."""
    stats = None if device.platform == "cpu" else device.memory_stats()
    if stats is None:
        return int(host_memory_bytes * HOST_SHARE), f"{HOST_SHARE:.1%} of this machine's memory"
    limit, used = stats["bytes_limit"], stats["bytes_in_use"]
    spare = int(limit * DEVICE_SHARE) - used - temp_bytes
    return spare, f"{DEVICE_SHARE:.0%} of {limit:,} less {used:,} in use and {temp_bytes:,} for the largest step"
