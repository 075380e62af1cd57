"""The scheduler's counters, as one value."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerStats:
    """Counts at one moment; since start: preemptions, prefix tokens (first admissions), pages that left windows."""

    num_running: int
    num_waiting: int
    num_preemptions: int
    prefix_queried_tokens: int
    prefix_hit_tokens: int
    num_left_pages: int
    num_free_pages: int
    num_cached_pages: int
    num_running_pages: int
    num_total_pages: int
