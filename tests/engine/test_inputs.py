"""A plan in its buffer: every token, row, page and parameter where the step reads it."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.engine.inputs import InputFiller, sampling_row
from jaxserve.layer_groups import GroupedLayout, LayerGroups
from jaxserve.sampling_params import SamplingParams
from jaxserve.scheduler import IN_FLIGHT_TOKEN, Request, Scheduler, StepPlan
from jaxserve.scheduler.page_need import sequence_need
from jaxserve.scheduler.pages import NO_PAGE
from jaxserve.step_inputs import StepInputs, StepShape, unpack

SHAPES = (
    StepShape(single_rows=4, chunk_tokens=0, chunk_rows=0, max_pages=3),
    StepShape(single_rows=4, chunk_tokens=8, chunk_rows=3, max_pages=3),
)
NUM_SLOTS = 5


def request_in(slot, prompt, **params):
    request = Request(request_id=f"r{slot}", prompt_token_ids=prompt, max_tokens=5)
    request.slot = slot
    return request, SamplingParams(**params)


def filled_inputs(filler, plan) -> tuple[StepShape, StepInputs]:
    shape = filler.shape_of(plan)
    buffer = filler.fill(plan, shape)
    return shape, unpack(jnp.asarray(buffer), shape)


def grouped(inputs: StepInputs) -> GroupedLayout:
    assert isinstance(inputs.paging, GroupedLayout)
    return inputs.paging


def plan_of(requests, starts, lengths, samples, token_ids, page_updates=()):
    return StepPlan(
        step=0,
        requests=requests,
        slots=[request.slot for request in requests],
        starts=starts,
        lengths=lengths,
        samples=samples,
        num_single_rows=lengths.count(1),
        token_ids=token_ids,
        placed=[],
        page_updates=list(page_updates),
    )


@pytest.fixture
def filled():
    """Two decodes (one of them of a token only the device knows) and two chunks, one of which asks for logprobs."""
    filler = InputFiller(SHAPES, NUM_SLOTS)
    placed = [
        request_in(2, [10, 11, 12], temperature=0.5, seed=1),
        request_in(0, [20, 21], top_k=7),
        request_in(4, [30, 31, 32, 33], prompt_logprobs=1),
        request_in(1, [40, 41, 42], logprobs=0, min_tokens=2),
    ]
    for number, (request, params) in enumerate(placed):
        filler.place(request, params, (number << 40) + number, params.prompt_logprobs is not None)
    plan = plan_of(
        [request for request, _ in placed],
        starts=[3, 2, 0, 0],
        lengths=[1, 1, 3, 3],
        samples=[True, True, False, True],
        token_ids=[13, IN_FLIGHT_TOKEN, 30, 31, 32, 40, 41, 42],
        page_updates=[(0, 2, 0, [6]), (0, 2, 1, [7, 8]), (0, 4, 0, [9]), (0, 1, 0, [5])],
    )
    shape, inputs = filled_inputs(filler, plan)
    assert shape == SHAPES[1]
    return inputs


def test_tokens_lie_in_row_order_with_padding_between_decodes_and_chunks(filled):
    assert filled.token_ids.tolist() == [13, -1, 0, 0, 30, 31, 32, 40, 41, 42, 0, 0]
    assert filled.layout.query_starts.tolist() == [0, 1, 2, 3, 4, 7, 10, 10]
    assert filled.layout.kv_lengths.tolist() == [4, 3, 0, 0, 3, 3, 0]
    assert filled.draws.tolist() == [1, 1, 0, 0, 0, 1, 0]
    assert filled.layout.num_single_rows == 4


def test_padding_rows_use_the_spare_slot(filled):
    assert filled.slots.tolist() == [2, 0, NUM_SLOTS, NUM_SLOTS, 4, 1, NUM_SLOTS]
    assert filled.sampling.slots.tolist() == filled.slots.tolist()
    assert filled.sampling.temperature.tolist() == [0.5, 1.0, 0.0, 0.0, 1.0, 1.0, 0.0]


def test_page_table_rows_follow_their_slots(filled):
    assert filled.layout.page_table.tolist() == [[6, 7, 8], [0] * 3, [0] * 3, [0] * 3, [9, 0, 0], [5, 0, 0], [0] * 3]


def test_groups_of_layers_have_page_tables_of_their_own():
    """Two for layers that see everything and one for layers that see 6 tokens, on pages of 4, 3 of which are held."""
    places = ((0, 0), (1, 0), (2, 0))
    sizes = {"layers_per_group": 1, "num_full": 2, "num_windowed": 1, "places": places}
    groups = LayerGroups(**sizes, window=6, window_pages=3, page_size=4)
    shape = StepShape(single_rows=2, chunk_tokens=0, chunk_rows=0, max_pages=7, groups=groups)
    filler = InputFiller((shape,), NUM_SLOTS)
    requests = [request_in(slot, [1])[0] for slot in (2, 4)]
    tables = [list(range(10 * number, 10 * number + 6)) for number in (1, 2, 3)]
    updates = [(number, 2, 0, table[:3]) for number, table in enumerate(tables)]
    updates += [(number, 2, 3, table[3:]) for number, table in enumerate(tables)]
    updates += [(2, 2, 0, [NO_PAGE] * 3), (0, 4, 0, [7]), (1, 4, 0, [8]), (2, 4, 0, [9])]
    _, inputs = filled_inputs(filler, plan_of(requests, [20, 2], [1, 1], [True, True], [5, 5], updates))
    found = [layout.page_table.tolist() for layout in grouped(inputs).layouts]
    assert [table[0][:6] for table in found[:2]] == tables[:2]
    assert found[2][0] == [-1, -1, -1, *tables[2][3:], -1]  # position 20 sees 15 and what follows
    assert [table[1][0] for table in found] == [7, 8, 9]
    assert grouped(inputs).places == places
    assert inputs.layout.page_table.tolist() == found[0]
    assert all(layout.kv_lengths.tolist() == [21, 3] for layout in grouped(inputs).layouts)


def test_pages_matched_behind_a_window_find_their_columns():
    places = ((0, 0), (1, 0))
    sizes = {"layers_per_group": 1, "num_full": 1, "num_windowed": 1, "places": places}
    groups = LayerGroups(**sizes, window=6, window_pages=3, page_size=4)
    shape = StepShape(single_rows=1, chunk_tokens=8, chunk_rows=1, max_pages=7, groups=groups)
    filler = InputFiller((shape,), NUM_SLOTS)
    request, _ = request_in(3, [1] * 24)
    updates = [(0, 3, 0, [10, 11, 12, 13, 14]), (1, 3, 0, [NO_PAGE, NO_PAGE, 22, 23, 24])]
    _, inputs = filled_inputs(filler, plan_of([request], [16], [4], [False], [5] * 4, updates))
    assert grouped(inputs).layouts[1].page_table[1].tolist() == [-1, -1, 22, 23, 24, -1, -1]


@pytest.mark.parametrize("overlap", [0, 1])
def test_tables_are_those_of_the_scheduler_whatever_happens(overlap):
    """Random traffic with preemptions, prefix hits and slots used again: each row's pages, as far as it sees."""
    rng = np.random.default_rng(overlap)
    need = sequence_need(6, 4, 8, (2, 2))
    assert need.windowed is not None
    places = tuple((group, 0) for group in range(4))
    sizes = {"layers_per_group": 1, "num_full": 2, "num_windowed": 2, "places": places}
    groups = LayerGroups(**sizes, window=6, window_pages=need.windowed.most, page_size=4)
    shape = StepShape(single_rows=5, chunk_tokens=8, chunk_rows=4, max_pages=20, groups=groups)
    limits: dict[str, Any] = {"max_num_seqs": NUM_SLOTS, "max_num_batched_tokens": 8, "max_model_len": 80}
    scheduler = Scheduler(num_pages=need.least_for(80) + 10, page_size=4, window=6, tables=(2, 2), **limits)
    filler = InputFiller((shape,), NUM_SLOTS)
    in_flight, num_checked = [], 0
    for step in range(400):
        if step < 300 and rng.random() < 0.2:
            prompt = [1] * int(rng.integers(1, 40)) + rng.integers(2, 4, int(rng.integers(0, 3))).tolist()
            scheduler.add(Request(request_id=str(step), prompt_token_ids=prompt, max_tokens=int(rng.integers(1, 40))))
        plan = scheduler.schedule()
        if plan is not None:
            in_flight.append(plan)
            tables = [scheduler._placement.updates_from(request, 0) for request in plan.requests]
            _, inputs = filled_inputs(filler, plan)
            found = np.stack([np.asarray(layout.page_table) for layout in grouped(inputs).layouts])
            num_checked += check_tables(found, plan, tables)
        while in_flight and (plan is None or len(in_flight) > overlap):
            plan = in_flight.pop(0)
            scheduler.commit(plan, [1] * len(plan.requests))
    stats = scheduler.stats()
    assert min(num_checked, stats.num_preemptions, stats.prefix_hit_tokens, stats.num_left_pages) > 10


def check_tables(found, plan, tables) -> int:
    for row, updates in enumerate(tables):
        at = row if row < plan.num_single_rows else 5 + row - plan.num_single_rows
        end = -(-(plan.starts[row] + plan.lengths[row]) // 4)
        for table, _, _, pages in updates:
            first = 0 if table < 2 else max(0, plan.starts[row] - 5) // 4
            assert NO_PAGE not in pages[first:end]
            assert found[table, at, first:end].tolist() == pages[first:end]
            assert table < 2 or set(found[table, at, :first]) <= {NO_PAGE}
    return len(tables)


def test_targets_are_the_next_prompt_tokens_of_those_who_ask(filled):
    assert filled.target_ids.tolist() == [-1, -1, -1, -1, 31, 32, 33, -1, -1, -1, -1, -1]
    assert int(filled.wants_prompt_logprobs) == 1


def test_sampling_parameters_follow_their_slots(filled):
    sampling = filled.sampling
    assert sampling.top_k.tolist() == [0, 7, 0, 0, 0, 0, 0]
    assert sampling.seed.tolist() == [[0, 0], [1, 256], [0, 0], [0, 0], [2, 512], [3, 768], [0, 0]]
    assert sampling.num_prompt_tokens.tolist() == [3, 2, 0, 0, 4, 3, 0]
    assert sampling.positions.tolist() == filled.layout.kv_lengths.tolist()
    assert sampling.mask_stops[jnp.asarray([0, 1, 5])].tolist() == [False, False, True]  # the rows that draw
    assert sampling.wants_logprobs.tolist() == [False, False, False, False, False, True, False]


def test_the_end_of_a_prompt_has_no_target_and_a_decode_none():
    filler = InputFiller(SHAPES, NUM_SLOTS)
    request, params = request_in(3, [30, 31, 32], prompt_logprobs=0)
    filler.place(request, params, 0, True)
    rows = ((0, [30, 31], [31, 32], 1), (2, [32], [-1], 0), (3, [IN_FLIGHT_TOKEN], [-1], 0))
    for start, ids, targets, wants in rows:
        shape, inputs = filled_inputs(filler, plan_of([request], [start], [len(ids)], [True], ids))
        first = 0 if len(ids) == 1 else shape.single_rows
        assert inputs.target_ids[first : first + len(ids)].tolist() == targets
        assert int(inputs.wants_prompt_logprobs) == wants


def test_a_slot_forgets_its_last_request():
    filler = InputFiller(SHAPES, NUM_SLOTS)
    first, params = request_in(3, [30, 31], prompt_logprobs=0, temperature=0.25)
    filler.place(first, params, 9, True)
    second, params = request_in(3, [50, 51])
    filler.place(second, params, 0, False)
    _, inputs = filled_inputs(filler, plan_of([second], [0], [2], [True], [50, 51]))
    assert set(inputs.target_ids.tolist()) == {-1}
    assert inputs.sampling.temperature[4] == 1.0
    assert inputs.sampling.seed[4].tolist() == [0, 0]


def test_a_sampling_row_keeps_every_bit_of_seeds_and_negative_numbers():
    row = sampling_row(SamplingParams(top_k=-1), 0xFEDCBA98_76543210, 3)
    assert row.dtype == np.int32
    assert row[6:].view(np.uint32).tolist() == [0xFFFFFFFF, 0x76543210, 0xFEDCBA98, 0, 3, 0]


def test_rows_of_requests_that_pool_say_so_and_their_slots_forget():
    filler = InputFiller(SHAPES, NUM_SLOTS)
    pooled, params = request_in(3, [30, 31])
    filler.place(pooled, params, 0, False, "last")
    other, params = request_in(1, [40])
    filler.place(other, params, 0, False, "mean")
    plan = plan_of([other, pooled], [0, 0], [1, 2], [True, True], [40, 30, 31])
    _, inputs = filled_inputs(filler, plan)
    assert inputs.pooling.tolist() == [1, 0, 0, 0, 2, 0, 0]
    filler.place(pooled, params, 0, False)
    _, inputs = filled_inputs(filler, plan)
    assert inputs.pooling.tolist() == [1, 0, 0, 0, 0, 0, 0]
