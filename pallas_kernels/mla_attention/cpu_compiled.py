"""The machine code of MLA: one FFI target for each dtype of the cache (see cpu.py for its layout).

Imported by the compiling child only. The heads and the queries of one sequence make "rows" of equal kind, one after
another in memory: row f is head f % N of query f // N. Rows are cut into tiles, items of work; within one, up to TILE
heads of the same query go together through the registers. Blocks, spans and their order are those of
paged_attention/cpu_compiled.py, and so is what follows: an output depends neither on the batch nor on how a prompt was
cut into chunks nor on the number of threads.
"""

from typing import Any

import numpy as np

from pallas_kernels.cpu import abi
from pallas_kernels.cpu.bridge import OK, arg, attr_f32, declare, dim, fail, ret
from pallas_kernels.cpu.memory import at, c_function, compiled, scratch, stack, text
from pallas_kernels.cpu.parallel import num_threads, parallel
from pallas_kernels.cpu.simd import f32, fma, i64, load_f32, load_i64s, splat_f32, store_f32, store_f32s, store_i64s
from pallas_kernels.cpu.simd_math import exp, first_lane, hsum, load_bf16, load_f32s, load_i32s, zeros
from pallas_kernels.mla_attention.cpu_tiles_compiled import (
    BLOCK_GROUPS_BYTES,
    GROUP_BYTES,
    WEIGHTS_BYTES,
    prefetch_keys,
    scores_with,
    values_with,
)
from pallas_kernels.paged_attention.cpu_checks_compiled import SUB, layout_check_of
from pallas_kernels.paged_attention.cpu_compiled import LOWEST, ROWS, SPAN, TILE_BYTES, cut, tile_at
from pallas_kernels.paged_attention.cpu_tiles_compiled import BLOCK, TILE, soften_with

LARGEST_KEY = 1024

# head_size: of the output; key_size: of queries and rows of the cache.
_WORDS = (
    "q", "latent", "out", "tiles", "partials", "partial_bytes", "num_tiles", "num_spans", "num_heads", "group",
    "head_size", "key_size", "num_pages", "page_size", "max_pages", "layer",
)  # fmt: skip
_JOB = np.dtype([(word, np.int64) for word in _WORDS] + [("scale", np.float32)], align=True)
_JOB_BYTES = _JOB.itemsize
_job_at = at(_JOB)

# Steps of an item: up to TILE rows of one query, int64 each: the first row, how many, keys < high are seen.
_COUNT, _HIGH, _STEP_BYTES = 8, 16, 24

_malloc = c_function("malloc", num_params=1, returns=True)
_free = c_function("free", num_params=1, returns=False)
_soften = soften_with(False)


@compiled
def _keys_seen(job, tile):
    """How many keys the last row of a tile sees."""
    last = tile.first_position + (tile.first_row + tile.num_rows - 1) // job.group
    return min(last + 1, job.max_pages * job.page_size)


@compiled
def _cut_into_steps(job, tile, steps):
    """Fills `steps`, at most one for each row; returns how many there are."""
    num_keys, num_steps, r = job.max_pages * job.page_size, i64(0), i64(0)
    while r < tile.num_rows:
        f = tile.first_row + r
        count = min(tile.num_rows - r, job.group - f % job.group)
        count = TILE if count >= TILE else 1
        step = steps + _STEP_BYTES * num_steps
        store_i64s(step, r)
        store_i64s(step + _COUNT, count)
        store_i64s(step + _HIGH, min(tile.first_position + f // job.group + 1, num_keys))
        num_steps, r = num_steps + 1, r + count
    return num_steps


@compiled
def _first_row(job, tile):
    """Number of a tile's first row, counted from the first head of token 0."""
    return tile.first_token * job.group + tile.first_row


def _find_groups_with(item_bytes: int) -> Any:
    """A compiled function: the four groups of rows from position `first` on, of which `high` are seen.

    Groups that nobody sees and pages outside the cache are one row of zeros, again and again.
    """
    no_row_bytes = 4 * LARGEST_KEY

    @compiled
    def find(job, tile, first, high, groups):
        for j in range(4):
            position, address, stride = first + SUB * j, zeros(no_row_bytes), i64(0)
            if position < high:
                page = load_i32s(tile.table + 4 * (position // job.page_size))
                if page >= 0 and page < job.num_pages:
                    stride = job.key_size * item_bytes
                    row = (job.layer * job.num_pages + page) * job.page_size + position % job.page_size
                    address = job.latent + row * stride
            store_i64s(groups + GROUP_BYTES * j, address)
            store_i64s(groups + GROUP_BYTES * j + 8, stride)

    return find


@compiled
def _soften_block(job, steps, num_steps, first, weights, state, num_rows):
    """Weights of a block from its products, for all rows that see some of it."""
    head_size = job.head_size
    lanes = state + 4 * num_rows * head_size
    tops = lanes + 64 * num_rows
    for i in range(num_steps):
        step = steps + _STEP_BYTES * i
        seen = min(load_i64s(step + _HIGH) - first, BLOCK)
        row = load_i64s(step)
        for r in range(row, row + load_i64s(step + _COUNT) if seen > 0 else row):
            _soften(weights + WEIGHTS_BYTES * r, 0, seen, job.scale, f32(0.0), 0, 0,
                    state + 4 * r * head_size, lanes + 64 * r, tops + 4 * r, head_size)  # fmt: skip


def _scores_with(load: Any, item_bytes: int) -> Any:
    """A compiled function: products of all rows of a tile with the keys of a block that they see.

    A row's products with up to three keys after those are made too. `ahead`: groups to prefetch meanwhile.
    """
    scores = scores_with(load, item_bytes)

    @compiled
    def four_keys(job, q, steps, num_steps, at, key, stride, weights):
        q_bytes = 4 * job.key_size
        for i in range(num_steps):
            step = steps + _STEP_BYTES * i
            if at < load_i64s(step + _HIGH):
                r = load_i64s(step)
                scores(load_i64s(step + _COUNT), q + q_bytes * r, q_bytes, key, stride, job.key_size,
                       weights + WEIGHTS_BYTES * r)  # fmt: skip

    @compiled
    def block(job, q, steps, num_steps, first, groups, ahead, weights):
        row_bytes = item_bytes * job.key_size
        for j in range(4):
            group, following = groups + GROUP_BYTES * j, ahead + GROUP_BYTES * j
            stride, following_stride = load_i64s(group + 8), load_i64s(following + 8)
            for k in range(0, SUB, 4):
                prefetch_keys(load_i64s(following) + k * following_stride, following_stride, row_bytes)
                four_keys(job, q, steps, num_steps, first + SUB * j + k, load_i64s(group) + k * stride, stride,
                          weights + 4 * (SUB * j + k))  # fmt: skip

    return block


def _values_with(load: Any, item_bytes: int) -> Any:
    """A compiled function: adds a block's weighted latents to the sums of all rows of a tile.

    Columns outside: what is read of the rows, 64 values each, stays in the nearest cache for all heads.
    """
    wide, narrow = values_with(load, item_bytes)

    @compiled
    def block(job, steps, num_steps, first, groups, weights, state):
        sums_bytes, column = 4 * job.head_size, i64(0)
        while column < job.head_size:
            is_wide = column + 64 <= job.head_size
            for i in range(num_steps):
                step = steps + _STEP_BYTES * i
                r, count, seen = load_i64s(step), load_i64s(step + _COUNT), load_i64s(step + _HIGH) - first
                seen, sums = min(seen, BLOCK), state + sums_bytes * r
                if seen > 0 and is_wide:
                    wide(count, weights + WEIGHTS_BYTES * r, groups, seen, column, sums, sums_bytes)
                elif seen > 0:
                    narrow(count, weights + WEIGHTS_BYTES * r, groups, seen, column, sums, sums_bytes)
            column += 64 if is_wide else 16

    return block


def _span_with(load: Any, item_bytes: int) -> Any:
    """A compiled function: a span of keys for all rows of a tile, starting with nothing.

    `state` gets, for the tile's rows, C sums of values each, then 16 sums of weights each, then the largest logits.
    """
    find_groups, score, add = (
        _find_groups_with(item_bytes),
        _scores_with(load, item_bytes),
        _values_with(load, item_bytes),
    )
    weights_bytes, steps_bytes = WEIGHTS_BYTES * ROWS, _STEP_BYTES * ROWS

    @compiled
    def attend(job, tile, first, end, state):
        """Keys from `first`, a multiple of BLOCK, up to `end`, all of one span."""
        num_rows, head_size, high = tile.num_rows, job.head_size, _keys_seen(job, tile)
        for i in range(0, num_rows * (head_size + 16), 16):
            store_f32(state + 4 * i, splat_f32(f32(0.0)))
        for r in range(num_rows):
            store_f32s(state + 4 * (num_rows * (head_size + 16) + r), LOWEST)
        weights, steps = scratch(weights_bytes), scratch(steps_bytes)
        groups, ahead = scratch(BLOCK_GROUPS_BYTES), scratch(BLOCK_GROUPS_BYTES)
        num_steps = _cut_into_steps(job, tile, steps)
        q = job.q + 4 * job.key_size * _first_row(job, tile)
        find_groups(job, tile, first, high, ahead)
        while first < end:
            for j in range(0, BLOCK_GROUPS_BYTES, 8):
                store_i64s(groups + j, load_i64s(ahead + j))
            find_groups(job, tile, first + BLOCK, high, ahead)
            score(job, q, steps, num_steps, first, groups, ahead, weights)
            _soften_block(job, steps, num_steps, first, weights, state, num_rows)
            add(job, steps, num_steps, first, groups, weights, state)
            first += BLOCK

    return attend


@compiled
def _start(job, tile, running):
    """Running sums of all rows before the first span: zeros in the output; in `running` a row's (total, top)."""
    out = job.out + 4 * job.head_size * _first_row(job, tile)
    for i in range(0, tile.num_rows * job.head_size, 16):
        store_f32(out + 4 * i, splat_f32(f32(0.0)))
    for r in range(tile.num_rows):
        store_f32s(running + 8 * r, f32(0.0))
        store_f32s(running + 8 * r + 4, LOWEST)


@compiled
def _merge(job, tile, state, running):
    """Adds a span to the running sums. One that a row sees nothing of changes nothing: its factor meets zeros."""
    num_rows, head_size = tile.num_rows, job.head_size
    for r in range(num_rows):
        lanes = state + 4 * (num_rows * head_size + 16 * r)
        span_top, total = load_f32s(state + 4 * (num_rows * (head_size + 16) + r)), load_f32s(running + 8 * r)
        old_top = load_f32s(running + 8 * r + 4)
        top = span_top if span_top > old_top else old_top
        keep, add = exp(splat_f32(old_top - top)), exp(splat_f32(span_top - top))
        total = total * first_lane(keep) + hsum(load_f32(lanes)) * first_lane(add)
        store_f32s(running + 8 * r, total)
        store_f32s(running + 8 * r + 4, top)
        out, sums = job.out + 4 * head_size * (_first_row(job, tile) + r), state + 4 * r * head_size
        for h in range(0, 4 * head_size, 64):
            store_f32(out + h, fma(load_f32(sums + h), add, load_f32(out + h) * keep))


@compiled
def _finish(job, tile, running):
    """Divides by the sum of weights."""
    for r in range(tile.num_rows):
        total, out = load_f32s(running + 8 * r), job.out + 4 * job.head_size * (_first_row(job, tile) + r)
        inverse = splat_f32(f32(0.0) if total == f32(0.0) else f32(1.0) / total)
        for h in range(0, 4 * job.head_size, 64):
            store_f32(out + h, load_f32(out + h) * inverse)


def _works_with(load: Any, item_bytes: int) -> Any:
    """Compiled functions `work(job, i)`: a tile whole; one span of a tile into `partials`; a tile from its spans."""
    attend = _span_with(load, item_bytes)
    running_bytes, state_bytes = 8 * ROWS, 4 * ROWS * (LARGEST_KEY + 17)

    @compiled
    def whole(address, i):
        job = _job_at(address)
        tile = tile_at(job.tiles + TILE_BYTES * i)
        running, state = scratch(running_bytes), scratch(state_bytes)
        num_keys = _keys_seen(job, tile)
        _start(job, tile, running)
        for first in range(0, num_keys, SPAN):
            attend(job, tile, first, min(first + SPAN, num_keys), state)
            _merge(job, tile, state, running)
        _finish(job, tile, running)

    @compiled
    def span(address, i):
        job = _job_at(address)
        tile = tile_at(job.tiles + TILE_BYTES * (i // job.num_spans))
        first = i % job.num_spans * SPAN
        end = min(first + SPAN, _keys_seen(job, tile))
        if first < end:
            attend(job, tile, first, end, job.partials + i * job.partial_bytes)

    @compiled
    def merged(address, i):
        job = _job_at(address)
        tile, running = tile_at(job.tiles + TILE_BYTES * i), scratch(running_bytes)
        _start(job, tile, running)
        for index in range((_keys_seen(job, tile) + SPAN - 1) // SPAN):
            _merge(job, tile, job.partials + (i * job.num_spans + index) * job.partial_bytes, running)
        _finish(job, tile, running)

    return whole, span, merged


def _operand_checks(name: str) -> Any:
    """A compiled function that compares the sizes of queries, result and cache."""
    wrong_shape = f"{name}: q, the cache and the result do not fit: %lld heads, keys of %lld, values of %lld"
    wrong_size = f"{name}: keys of %lld and values of %lld must be multiples of 16, and keys at most 1024"
    wrong_pages = f"{name}: %lld tokens a page are no multiple of 16"
    wrong_layer = f"{name}: layer %lld of %lld"

    @compiled
    def check(call):
        q, latent, out, layer = arg(call, 0), arg(call, 1), ret(call, 0), load_i32s(arg(call, 5).data)
        num_heads, key_size, head_size = dim(q, 1), dim(q, 2), dim(out, 2)
        good = dim(q, 0) == dim(out, 0) and num_heads == dim(out, 1) and key_size == dim(latent, 3)
        if not good or num_heads < 1 or head_size > key_size:
            return fail(call, abi.INVALID_ARGUMENT, text(wrong_shape), num_heads, key_size, head_size)
        if head_size < SUB or head_size % SUB != 0 or key_size % SUB != 0 or key_size > LARGEST_KEY:
            return fail(call, abi.INVALID_ARGUMENT, text(wrong_size), key_size, head_size, 0)
        if dim(latent, 2) < SUB or dim(latent, 2) % SUB != 0:
            return fail(call, abi.INVALID_ARGUMENT, text(wrong_pages), dim(latent, 2), 0, 0)
        if layer < 0 or layer >= dim(latent, 0):
            return fail(call, abi.INVALID_ARGUMENT, text(wrong_layer), layer, dim(latent, 0), 0)
        return OK

    return check


@compiled
def _fill(call, job):
    """Reads a checked call into a job."""
    q, latent, out = arg(call, 0), arg(call, 1), ret(call, 0)
    job.q, job.latent, job.out = q.data, latent.data, out.data
    job.num_heads, job.group, job.key_size, job.head_size = dim(q, 1), dim(q, 1), dim(q, 2), dim(out, 2)
    job.num_pages, job.page_size, job.max_pages = dim(latent, 1), dim(latent, 2), dim(arg(call, 4), 1)
    job.layer, job.scale = load_i32s(arg(call, 5).data), attr_f32(call, 0)


def _target(name: str, dtype: int, load: Any, item_bytes: int) -> Any:
    """The FFI target for one dtype of the cache."""
    check, check_layout = _operand_checks(name), layout_check_of(name, 2)
    run_whole, run_spans, run_merge = (parallel(work) for work in _works_with(load, item_bytes))
    no_memory = f"{name}: no memory for %lld bytes"

    @compiled
    def run(call, address):
        """Shares the spans of sequences out only where there are too few tiles to keep all threads busy."""
        job = _job_at(address)
        threads = num_threads(call)
        if job.num_tiles >= 4 * threads or job.num_spans < 2 or threads == 1:
            run_whole(call, address, job.num_tiles)
            return OK
        most_rows = i64(0)
        for i in range(job.num_tiles):
            most_rows = max(most_rows, tile_at(job.tiles + TILE_BYTES * i).num_rows)
        job.partial_bytes = (4 * most_rows * (job.head_size + 17) + 63) // 64 * 64
        num_bytes = job.num_tiles * job.num_spans * job.partial_bytes
        job.partials = _malloc(num_bytes)
        if job.partials == 0:
            return fail(call, abi.INTERNAL, text(no_memory), num_bytes, 0, 0)
        run_spans(call, address, job.num_tiles * job.num_spans)
        run_merge(call, address, job.num_tiles)
        _free(job.partials)
        return OK

    @compiled
    def body(call):
        num_tokens, lengths, starts, table = dim(arg(call, 0), 0), arg(call, 2), arg(call, 3), arg(call, 4)
        error = check(call)
        if error == OK:
            error = check_layout(call, num_tokens)
        if error != OK:
            return error
        address = stack(_JOB_BYTES)
        job = _job_at(address)
        _fill(call, job)
        # Each sequence may leave its last tile unfilled.
        num_bytes = TILE_BYTES * (num_tokens * job.group // ROWS + min(num_tokens, dim(lengths, 0)) + 1)
        job.tiles = _malloc(num_bytes)
        if job.tiles == 0:
            return fail(call, abi.INTERNAL, text(no_memory), num_bytes, 0, 0)
        num_sequences = dim(lengths, 0)
        job.num_tiles, longest = cut(job, num_tokens, lengths.data, starts.data, num_sequences, table.data, job.tiles)
        job.num_spans = (longest + SPAN - 1) // SPAN
        if job.num_tiles > 0:
            error = run(call, address)
        _free(job.tiles)
        return error

    layout = [(abi.S32, 1), (abi.S32, 1), (abi.S32, 2), (abi.S32, 0)]
    return declare(name, body, args=[(abi.F32, 3), (dtype, 4), *layout], rets=[(abi.F32, 3)], attrs={"scale": abi.F32})


attend_float32 = _target("mla_attention float32", abi.F32, load_f32, 4)
attend_bfloat16 = _target("mla_attention bfloat16", abi.BF16, load_bf16, 2)
