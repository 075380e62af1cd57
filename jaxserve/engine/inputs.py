"""From a step plan (lists of ints) to the packed host buffer of its bucket."""

import numpy as np
from jaxtyping import Int32

from jaxserve.engine.buckets import choose_shape
from jaxserve.engine.pooling import CODES
from jaxserve.pooling_params import Pooling
from jaxserve.sampling_params import SamplingParams
from jaxserve.scheduler.pages import NO_PAGE
from jaxserve.scheduler.request import Request
from jaxserve.scheduler.step_plan import StepPlan
from jaxserve.step_inputs import FLOAT_COLUMNS, INT_COLUMNS, NUM_COLUMNS, StepShape, buffer_views

_WORD = 0xFFFFFFFF


class InputFiller:
    """Keeps the host's copy of the page tables and sampling rows by slot, and fills buffers from them.

    Rows change only when a request enters a slot or gets a page, so a step costs a few numpy calls whatever its size.
    """

    def __init__(self, shapes: tuple[StepShape, ...], num_slots: int) -> None:
        self._shapes = shapes
        self._spare = num_slots
        self._scoring: set[int] = set()  # slots whose requests want prompt logprobs
        self._pooling: dict[int, int] = {}  # codes of slots whose requests want hidden states pooled
        groups = shapes[0].groups
        num_full, num_windowed = (1, 0) if groups is None else (groups.num_full, groups.num_windowed)
        self._page_tables = np.zeros((num_full, num_slots + 1, shapes[0].max_pages), np.int32)
        num_held = 0 if groups is None else groups.window_pages
        self._window_pages = np.zeros(
            (num_windowed, num_slots + 1, num_held), np.int32
        )  # the page at i in i % num_held
        self._sampling = np.zeros((num_slots + 1, NUM_COLUMNS), np.int32)
        self._sampling[num_slots] = sampling_row(SamplingParams(temperature=0.0), 0, 0)

    def place(
        self,
        request: Request,
        params: SamplingParams,
        seed: int,
        wants_prompt_logprobs: bool,
        pooling: Pooling | None = None,
    ) -> None:
        """Takes over a request's sampling parameters into its slot."""
        assert request.slot is not None
        self._scoring.discard(request.slot)
        if wants_prompt_logprobs:
            self._scoring.add(request.slot)
        self._pooling.pop(request.slot, None)
        if pooling is not None:
            self._pooling[request.slot] = CODES[pooling]
        self._sampling[request.slot] = sampling_row(params, seed, len(request.prompt_token_ids))

    def shape_of(self, *plans: StepPlan) -> StepShape:
        """The smallest bucket that holds each of the plans."""
        singles = max(plan.num_single_rows for plan in plans)
        tokens = max(len(plan.token_ids) - plan.num_single_rows for plan in plans)
        rows = max(len(plan.slots) - plan.num_single_rows for plan in plans)
        return choose_shape(self._shapes, singles, tokens, rows)

    def fill(self, plan: StepPlan, shape: StepShape) -> Int32[np.ndarray, "W"]:
        """The filled buffer of a plan in a bucket that holds it."""
        self._update_tables(plan)
        singles, num_rows = plan.num_single_rows, len(plan.slots)
        chunks = num_rows - singles
        buffer, views = buffer_views(shape)
        rows = np.full(shape.num_rows, self._spare, np.int32)
        first_chunk = shape.single_rows
        rows[:singles] = plan.slots[:singles]
        rows[first_chunk : first_chunk + chunks] = plan.slots[singles:]
        self._fill_tokens(views, shape, plan)
        self._fill_rows(views, shape, plan)
        views["slots"][:] = rows
        self._fill_targets(views, shape, plan)
        if self._pooling:
            views["pooling"][:] = [self._pooling.get(slot, 0) for slot in rows.tolist()]
        views["sampling"][:] = self._sampling[rows]
        np.take(self._page_tables[0], rows, axis=0, out=views["page_table"])
        if shape.groups is not None:
            views["more_page_tables"][:] = self._page_tables[1:, rows]
            views["window_pages"][:] = self._window_pages[:, rows]
        return buffer

    def _update_tables(self, plan: StepPlan) -> None:
        num_full, num_held = len(self._page_tables), self._window_pages.shape[2]
        for table, slot, first, pages in plan.page_updates:
            if table < num_full:
                self._page_tables[table, slot, first : first + len(pages)] = pages
                continue
            num_left = pages.count(NO_PAGE)  # they come first; the step knows that they are gone
            columns = np.arange(first + num_left, first + len(pages)) % num_held
            self._window_pages[table - num_full, slot, columns] = pages[num_left:]

    def _fill_tokens(self, views: dict[str, np.ndarray], shape: StepShape, plan: StepPlan) -> None:
        singles, tokens = plan.num_single_rows, plan.token_ids
        num_chunk_tokens = len(tokens) - singles
        views["token_ids"][:singles] = tokens[:singles]
        if num_chunk_tokens:
            views["token_ids"][shape.single_rows : shape.single_rows + num_chunk_tokens] = tokens[singles:]
        starts = views["query_starts"]
        starts[: shape.single_rows] = np.arange(shape.single_rows)
        lengths = np.zeros(shape.chunk_rows + 1, np.int32)
        lengths[0] = shape.single_rows
        lengths[1 : 1 + len(plan.lengths) - singles] = plan.lengths[singles:]
        np.cumsum(lengths, out=starts[shape.single_rows :])

    def _fill_targets(self, views: dict[str, np.ndarray], shape: StepShape, plan: StepPlan) -> None:
        """The prompt token that follows each token, for requests that want prompt logprobs."""
        views["target_ids"][:] = -1
        if not self._scoring:
            return
        chunk_token = shape.single_rows
        for row, request in enumerate(plan.requests):
            is_chunk = row >= plan.num_single_rows
            first, start, length = chunk_token if is_chunk else row, plan.starts[row], plan.lengths[row]
            chunk_token += length if is_chunk else 0
            targets = request.prompt_token_ids[start + 1 : start + length + 1]
            if plan.slots[row] in self._scoring and targets:
                views["target_ids"][first : first + len(targets)] = targets
                views["wants_prompt_logprobs"][...] = 1

    def _fill_rows(self, views: dict[str, np.ndarray], shape: StepShape, plan: StepPlan) -> None:
        singles, chunks = plan.num_single_rows, len(plan.slots) - plan.num_single_rows
        ends = np.asarray(plan.starts, np.int32) + np.asarray(plan.lengths, np.int32)
        first_chunk = shape.single_rows
        parts = (
            (slice(0, singles), slice(0, singles)),
            (slice(first_chunk, first_chunk + chunks), slice(singles, None)),
        )
        for part, planned in parts:
            views["kv_lengths"][part] = ends[planned]
            views["draws"][part] = plan.samples[planned]


def sampling_row(params: SamplingParams, seed: int, num_prompt_tokens: int) -> np.ndarray:
    """One request's sampling parameters as the int32 columns of `step_inputs`."""
    row = np.zeros(NUM_COLUMNS, np.int32)
    row[: len(FLOAT_COLUMNS)].view(np.float32)[:] = [getattr(params, name) for name in FLOAT_COLUMNS]
    words = {
        "top_k": params.top_k,
        "seed_low": seed & _WORD,
        "seed_high": (seed >> 32) & _WORD,
        "min_tokens": params.min_tokens,
        "num_prompt_tokens": num_prompt_tokens,
        "wants_logprobs": params.logprobs is not None,
    }
    row[len(FLOAT_COLUMNS) :].view(np.uint32)[:] = [words[name] & _WORD for name in INT_COLUMNS]
    return row
