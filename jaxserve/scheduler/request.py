"""One request as the scheduler sees it: what the caller asked for, and how far it has come.

Knows token ids, pages and counts. Does not know text, sampling parameters (an opaque payload) or arrays.
"""

from collections.abc import Hashable
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal

from jaxserve.errors import InvalidRequest, PromptTooLong
from jaxserve.scheduler.prefix_cache import Node

SchedulerFinishReason = Literal["stop", "length", "abort"]


class Status(Enum):
    """Where a request is. A preempted request is WAITING again, with num_preemptions above 0."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False, kw_only=True)
class Request:
    """A request and its progress. The caller sets the first block; only the scheduler writes the second.

    max_tokens is already resolved and at least 1. min_tokens: no end-of-sequence or stop id ends it before so many
    outputs (the device masks them too). eos_token_ids is empty when end-of-sequence is to be ignored. Lower priority
    runs first, first come first served within one priority. Requests share cached pages only within one
    cache_domain (model version, adapter, cache salt). reads_prefix_cache is False when every prompt position has to
    be computed, as for prompt logprobs.
    """

    request_id: str
    prompt_token_ids: list[int]
    max_tokens: int
    min_tokens: int = 0
    eos_token_ids: frozenset[int] = frozenset()
    stop_token_ids: frozenset[int] = frozenset()
    priority: int = 0
    cache_domain: Hashable = ()
    reads_prefix_cache: bool = True
    payload: object = None

    token_ids: list[int] = field(init=False)
    """The prompt and all committed outputs."""
    num_computed_tokens: int = field(init=False, default=0)
    """Positions whose keys and values a committed step has written (or the prefix cache held)."""
    num_scheduled_tokens: int = field(init=False, default=0)
    """num_computed_tokens and the positions of steps in flight."""
    num_in_flight_steps: int = field(init=False, default=0)
    num_draws_in_flight: int = field(init=False, default=0)
    """Steps in flight that draw a new token; so many tokens follow token_ids that the host does not know yet."""
    tables: list[list[int]] = field(init=False, default_factory=list)
    """For each kind of layers its pages in order (sets of pages, see pages.py, where it has several page tables)."""
    num_columns: int = field(init=False, default=0)
    """Length of each of the tables."""
    num_left_pages: int = field(init=False, default=0)
    """So many pages at the start of the windowed layers' table left the window of every token to come and were given
    back: NO_PAGE in the table."""
    cache_path: list[Node] = field(init=False, default_factory=list)
    """Root and one node per full page that is in the prefix cache; holds a reference on each page of each node that
    has not left the window."""
    next_cached_at: int = field(init=False, default=0)
    """Number of computed tokens at which the next page is full and enters the prefix cache."""
    next_left_at: int = field(init=False, default=0)
    """Number of computed tokens at which the next page leaves the window."""
    slot: int | None = field(init=False, default=None)
    status: Status = field(init=False, default=Status.WAITING)
    finish_reason: SchedulerFinishReason | None = field(init=False, default=None)
    num_cached_tokens: int = field(init=False, default=0)
    """Prompt tokens the prefix cache supplied at the first admission."""
    num_admissions: int = field(init=False, default=0)
    num_preemptions: int = field(init=False, default=0)
    arrival: int = field(init=False, default=-1)
    rank: tuple[int, int] = field(init=False, default=(0, -1))
    """(priority, arrival): unique, smaller is better."""
    max_total_tokens: int = field(init=False, default=0)
    """Prompt and outputs together never exceed this; set from max_tokens and the model's limit."""
    ending_token_ids: frozenset[int] = field(init=False)
    room_wanted: int = field(init=False, default=0)
    """Room, in pages, below which trying to admit it again is pointless (see admission in scheduler.py)."""

    def __post_init__(self) -> None:
        self.token_ids = list(self.prompt_token_ids)
        self.ending_token_ids = self.eos_token_ids | self.stop_token_ids

    @property
    def num_output_tokens(self) -> int:
        """Committed outputs."""
        return len(self.token_ids) - len(self.prompt_token_ids)

    @property
    def num_held_pages(self) -> int:
        """Entries of the windowed layers' table that are pages; in that of the others all are."""
        return self.num_columns - self.num_left_pages

    @property
    def is_finished(self) -> bool:
        """True once it ended or was aborted."""
        return self.status is Status.FINISHED


def check_fits(request: Request, *, max_model_len: int, num_cache_tokens: int) -> None:
    """Raises InvalidRequest or PromptTooLong for a request that could never run to its end, even alone."""
    assert request.max_tokens >= 1, "max_tokens is resolved before a request is added"
    num_prompt = len(request.prompt_token_ids)
    if not num_prompt:
        raise InvalidRequest("the prompt has no tokens; send at least one", param="prompt")
    if num_prompt + 1 > max_model_len:
        raise PromptTooLong(
            f"prompt has {num_prompt:,} tokens; this model accepts {max_model_len - 1:,} and one to generate"
            " (--max-model-len)",
            param="prompt",
        )
    total = min(num_prompt + request.max_tokens, max_model_len)
    if total > num_cache_tokens:
        raise PromptTooLong(
            f"prompt and max_tokens need {total:,} tokens; the KV cache holds {num_cache_tokens:,};"
            " lower max_tokens or give the cache more memory",
            param="max_tokens",
        )
