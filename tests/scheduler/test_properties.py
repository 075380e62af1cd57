"""Random traffic against the fake executor: whatever happens beside it, a request's tokens are those it has alone."""

from collections import Counter

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxserve.scheduler import Request, Scheduler

MIN_OPERATIONS = 30
EXAMPLES = 60  # times at least 30 operations times 6 cases: more than 10,000
SEEN: Counter[str] = Counter()

ADDS = st.tuples(
    st.just("add"),
    st.integers(0, 3),  # shared pages of the prompt
    st.sampled_from([-1, 0, 1, 3]),  # tokens beyond them
    st.integers(0, 2),  # which continuation
    st.integers(1, 20),  # max_tokens
    st.sampled_from([0, 0, 0, -1, 2]),  # priority
    st.sampled_from([0, 0, 1]),  # cache domain
    st.sampled_from(["none", "none", "eos", "stop", "min"]),  # how it may end early
    st.sampled_from([True, True, True, False]),  # reads the prefix cache
)
OPERATIONS = st.lists(
    st.one_of(
        ADDS,
        ADDS,
        st.tuples(st.just("step"), st.integers(1, 4)),
        st.tuples(st.just("step"), st.integers(1, 4)),
        st.tuples(st.just("schedule")),
        st.tuples(st.just("commit")),
        st.tuples(st.just("abort"), st.integers(0, 1000)),
        st.tuples(st.just("reset")),
    ),
    min_size=MIN_OPERATIONS,
    max_size=2 * MIN_OPERATIONS,
)
LIMITS = st.fixed_dictionaries(
    {
        "extra_pages": st.integers(0, 6),
        "max_num_seqs": st.integers(1, 6),
        "max_num_batched_tokens": st.sampled_from([1, 2, 5, 17, 64, 300]),
        "max_prefills_per_step": st.integers(1, 3),
        "max_prefill_chunk": st.sampled_from([None, None, 3, 16]),
        "enable_prefix_caching": st.sampled_from([True, True, True, False]),
    }
)


class Traffic:
    """One scheduler under random operations, with what has to hold after each. Few pages: what one sequence needs."""

    def __init__(
        self, fake, page_size: int, overlap: int, limits: dict, window: int | None, tables: tuple[int, int]
    ) -> None:
        self.fake, self.page_size, self.limits = fake, page_size, dict(limits)
        self.max_model_len = 3 * page_size + 15
        in_window = self.max_model_len if window is None else min(self.max_model_len, window - 1 + page_size)
        full, windowed = -(-self.max_model_len // page_size), -(-in_window // page_size)
        num_pages = tables[0] * full + tables[1] * windowed + self.limits.pop("extra_pages")
        self.scheduler = Scheduler(
            num_pages=num_pages,
            page_size=page_size,
            max_model_len=self.max_model_len,
            window=window,
            tables=tables,
            **self.limits,
        )
        self.loop = fake.Loop(self.scheduler, page_size, overlap, window, tables)
        self.requests: list[Request] = []
        self.outputs: dict[Request, list[int]] = {}

    def apply(self, operation: tuple) -> None:
        getattr(self, operation[0])(*operation[1:])
        self.scheduler.check_invariants()
        limits = self.limits
        for plan in self.loop.plans:
            assert plan.num_tokens <= limits["max_num_batched_tokens"]
            assert len(plan.requests) - plan.num_single_rows <= limits["max_prefills_per_step"]
            assert max(plan.lengths) <= (limits["max_prefill_chunk"] or plan.num_tokens)
        self.loop.plans.clear()
        assert self.scheduler.num_running <= limits["max_num_seqs"]

    def add(self, pages, beyond, continuation, max_tokens, priority, domain, ending, reads) -> None:
        num_prompt = max(1, pages * self.page_size + beyond)
        prompt = [index % 5 for index in range(num_prompt)]
        prompt[-1] = continuation
        request = Request(
            request_id=str(len(self.requests)),
            prompt_token_ids=prompt,
            max_tokens=max_tokens,
            min_tokens=min(4, max_tokens) if ending == "min" else 0,
            eos_token_ids=frozenset({3}) if ending in ("eos", "min") else frozenset(),
            stop_token_ids=frozenset({4, 5}) if ending == "stop" else frozenset(),
            priority=priority,
            cache_domain=domain,
            reads_prefix_cache=reads,
        )
        self.requests.append(request)
        self.scheduler.add(request)

    def step(self, count: int) -> None:
        for _ in range(count):
            self.loop.step()
            self.scheduler.check_invariants()

    def schedule(self) -> None:
        if len(self.loop.in_flight) <= self.loop.overlap:
            self.loop.schedule()

    def commit(self) -> None:
        if self.loop.in_flight:
            self.loop.commit()

    def abort(self, number: int) -> None:
        if self.requests:
            request = self.requests[number % len(self.requests)]
            was_alive = not request.is_finished
            assert self.scheduler.abort(request.request_id) == was_alive

    def reset(self) -> None:
        self.scheduler.reset_prefix_cache()
        assert self.scheduler.stats().num_cached_pages == 0

    def check_outputs(self) -> None:
        given_out: dict[Request, list[int]] = {request: [] for request in self.requests}
        ended: dict[Request, str] = {}
        for event in self.loop.events:
            assert event.request not in ended, "a token after the end"
            given_out[event.request] += event.token_ids
            if event.finish_reason:
                ended[event.request] = event.finish_reason
        for request in self.requests:
            outputs, reason = self.fake.outputs_alone(request, self.max_model_len)
            got = given_out[request]
            assert got == request.token_ids[len(request.prompt_token_ids) :]
            if request.finish_reason == "abort":
                assert request not in ended
                assert got == outputs[: len(got)]
            else:
                assert (got, request.finish_reason, ended[request]) == (outputs, reason, reason)


# Page size, window, page tables of layers without and with it.
ONE_KIND = [(1, None, (1, 0)), (16, None, (1, 0)), (64, None, (1, 0))]
WINDOWS = [(page, window, (0, 1)) for page, window in [(1, 2), (1, 7), (4, 3), (4, 9), (16, 16), (16, 18)]]
BOTH_KINDS = [(1, 7, (1, 3)), (4, 1, (1, 1)), (4, 3, (1, 2)), (4, 9, (2, 1)), (16, 18, (2, 3))]


@pytest.mark.parametrize("overlap", [0, 1])
@pytest.mark.parametrize(("page_size", "window", "tables"), ONE_KIND + WINDOWS + BOTH_KINDS)
def test_everyone_finishes_with_the_tokens_it_has_alone(fake, page_size, window, tables, overlap):
    """With a window, at any time: the pages that tokens to come see are there, no more than a window and two chunks
    need, and nobody else's (check_invariants, and the fake device at each read)."""

    @settings(max_examples=EXAMPLES, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
    @given(limits=LIMITS, operations=OPERATIONS)
    def holds(limits, operations):
        traffic = Traffic(fake, page_size, overlap, limits, window, tables)
        for operation in operations:
            traffic.apply(operation)
        traffic.loop.drain()
        traffic.check_outputs()
        stats = traffic.scheduler.stats()
        assert (stats.num_running_pages, stats.num_running, stats.num_waiting) == (0, 0, 0)
        assert stats.num_free_pages + stats.num_cached_pages == stats.num_total_pages
        SEEN["operations"] += len(operations)
        SEEN["preemptions"] += stats.num_preemptions
        SEEN["hits"] += stats.prefix_hit_tokens
        SEEN["left"] += stats.num_left_pages

    SEEN.clear()
    holds()
    # The traffic must reach what it is meant to test.
    assert SEEN["operations"] >= EXAMPLES * MIN_OPERATIONS
    assert SEEN["preemptions"] > 0
    assert SEEN["hits"] > 0
    assert (SEEN["left"] > 0) == (window is not None)
