"""The machine code of paged attention: one FFI target for each dtype of the cache (see cpu.py for its layout).

Imported by the compiling child only. The G query heads that share a kv head and the queries of one sequence make
"rows" of equal kind: row f is head f % G of query f // G. Rows are cut into tiles; a tile and a kv head are an item of
work. Whatever tile a row is in, its arithmetic is the same: scores are one chain of products over the head; keys are
taken in blocks of BLOCK at absolute positions, with a running softmax (FlashAttention, arXiv 2205.14135) that starts
anew at each multiple of SPAN; spans are merged in order. So an output depends neither on the batch nor on how a prompt
was cut into chunks nor on the number of threads, and the spans of a long sequence can be shared out to threads.
"""

from typing import Any

import numpy as np

from pallas_kernels.cpu import abi
from pallas_kernels.cpu.bridge import OK, arg, attr_f32, attr_i64, declare, dim, fail, ret
from pallas_kernels.cpu.memory import at, c_function, compiled, scratch, stack, text
from pallas_kernels.cpu.parallel import num_threads, parallel
from pallas_kernels.cpu.simd import (
    f32,
    fma,
    i64,
    load_f32,
    load_i64s,
    splat_f32,
    store_f32,
    store_f32s,
    store_i64s,
)
from pallas_kernels.cpu.simd_math import (
    exp,
    first_lane,
    hsum,
    load_bf16,
    load_f32s,
    load_i8_as_f32,
    load_i32s,
    zeros,
)
from pallas_kernels.paged_attention.cpu_checks_compiled import LARGEST_HEAD, SUB, checks_of, same_dims
from pallas_kernels.paged_attention.cpu_tiles_compiled import (
    BLOCK,
    MINUS_INFINITY,
    TILE,
    add_row_values,
    add_values,
    scores_of_block,
    soften_with,
)

SPAN = 512  # keys summed by themselves; a multiple of BLOCK
ROWS = 32  # rows of a tile of work at most
LOWEST = f32(-1e30)  # finite: exp(LOWEST - LOWEST) must not be NaN for rows that see nothing

_WORDS = (
    "q", "k", "v", "k_scale", "v_scale", "sinks", "out", "tiles", "partials", "partial_bytes", "num_tiles", "num_spans",
    "num_heads", "num_kv_heads", "group", "head_size", "num_pages", "page_size", "max_pages", "layer", "window",
    "heads_per_item", "tiles_per_item",
)  # fmt: skip
_JOB = np.dtype([(word, np.int64) for word in _WORDS] + [("scale", np.float32), ("soft_cap", np.float32)])
JOB_BYTES = _JOB.itemsize
_job_at = at(_JOB)

# table: address of the sequence's page numbers; rows first_row .. of the tokens from first_token on, the first of
# which is at first_position.
_TILE = np.dtype(
    [(word, np.int64) for word in ("table", "first_token", "first_position", "first_row", "num_rows")], align=True
)
TILE_BYTES = _TILE.itemsize
tile_at = at(_TILE)

# Per row of an item, int64 each: keys low <= position < high are seen; address of the row's output.
_LOW, _HIGH, _OUT, _ROW_BYTES = 0, 8, 16, 24

_malloc = c_function("malloc", num_params=1, returns=True)
_free = c_function("free", num_params=1, returns=False)


@compiled
def _keys_seen(job, tile):
    """The keys that any row of a tile sees: (lowest, past highest)."""
    first = tile.first_position + tile.first_row // job.group
    last = tile.first_position + (tile.first_row + tile.num_rows - 1) // job.group
    return max(first - job.window + 1, 0), min(last + 1, job.max_pages * job.page_size)


@compiled
def _describe_rows(job, tile, head, rows):
    """Fills `rows`."""
    group, num_keys = job.group, job.max_pages * job.page_size
    for r in range(tile.num_rows):
        f = tile.first_row + r
        position = tile.first_position + f // group
        low, high = max(position - job.window + 1, 0), min(position + 1, num_keys)
        at = 4 * job.head_size * ((tile.first_token + f // group) * job.num_heads + head * group + f % group)
        row = rows + _ROW_BYTES * r
        store_i64s(row + _LOW, low)
        store_i64s(row + _HIGH, high)
        store_i64s(row + _OUT, job.out + at)


@compiled
def _pack(job, tile, rows, packed):
    """Copies the queries to `packed`, TILE rows interleaved."""
    for r in range(tile.num_rows):
        q = job.q + load_i64s(rows + _ROW_BYTES * r + _OUT) - job.out
        target = packed + 4 * ((r // TILE) * TILE * job.head_size + r % TILE)
        for h in range(job.head_size):
            store_f32s(target + 4 * TILE * h, load_f32s(q + 4 * h))


@compiled
def _find_blocks(job, tile, head, first, low, high, blocks):
    """Fills `blocks` with the numbers, counted in groups of 16 positions, of four groups from position `first` on.

    -1 stands for positions that nobody sees and for pages outside the cache.
    """
    per_page = job.page_size // SUB
    for j in range(4):
        position, block = first + SUB * j, i64(-1)
        if position + SUB > low and position < high:
            page = load_i32s(tile.table + 4 * (position // job.page_size))
            if page >= 0 and page < job.num_pages:
                block = ((job.layer * job.num_pages + page) * job.num_kv_heads + head) * per_page
                block += position % job.page_size // SUB
        store_i64s(blocks + 8 * j, block)


@compiled
def _copy_blocks(source, target):
    for j in range(4):
        store_i64s(target + 8 * j, load_i64s(source + 8 * j))


@compiled
def _first_blocks(job, tile, head, blocks):
    """As `_find_blocks`, of those that a tile begins with."""
    low, high = _keys_seen(job, tile)
    _find_blocks(job, tile, head, low // BLOCK * BLOCK, low, high, blocks)


@compiled
def _addresses(blocks, start, block_bytes, out):
    """Addresses of four blocks of a cache array; those that are nowhere are zeros."""
    for j in range(4):
        block = load_i64s(blocks + 8 * j)
        store_i64s(out + 8 * j, start + block * block_bytes if block >= 0 else zeros(16384))


def _widen_with(load: Any, item_bytes: int) -> Any:
    """A compiled function: float32 copies of four blocks, whose addresses it replaces."""

    @compiled
    def widen(addresses, block_length, out):
        for j in range(4):
            source, target = load_i64s(addresses + 8 * j), out + 4 * j * block_length
            for i in range(0, block_length, 16):
                store_f32(target + 4 * i, load(source + item_bytes * i))
            store_i64s(addresses + 8 * j, target)

    return widen


@compiled
def _limits(row, first):
    """What a row sees of the block that begins at `first`: low <= i < high, counted from there."""
    return max(load_i64s(row + _LOW) - first, 0), min(load_i64s(row + _HIGH) - first, BLOCK)


@compiled
def _common_limits(rows, count, first):
    """What all of `count` rows see of a block, low <= i < high, then what any of them sees."""
    low, high, any_low, any_high = i64(0), i64(BLOCK), i64(BLOCK), i64(0)
    for i in range(count):
        start, stop = _limits(rows + _ROW_BYTES * i, first)
        low, high = max(low, start), min(high, stop)
        any_low, any_high = min(any_low, start), max(any_high, stop)
    return min(low, BLOCK), max(high, 0), any_low, any_high


@compiled
def _add_outside(rows, count, first, low, high, is_before, weights, values, sums, head_size):
    """Adds the values that not all rows see, row by row: those before `low`, or those from `high` on.

    So a value that a row does not see never touches it, whatever it is.
    """
    for i in range(count):
        start, stop = _limits(rows + _ROW_BYTES * i, first)
        if is_before:
            stop = min(low, stop)
        else:
            start = max(high, max(low, start))
        add_row_values(weights + 256 * i, values, values, 4, start, stop, sums + 4 * i * head_size, head_size)


def _block_with(has_scales: bool, item_bytes: int) -> Any:
    """A compiled function: one block of keys and values for all rows of an item."""
    soften = soften_with(has_scales)

    @compiled
    def tile_of_rows(job, rows, count, first, q, sums, lanes, tops, pointers):
        head_size, weights, keys, values = job.head_size, scratch(1024), pointers, pointers + 32
        low, high, any_low, any_high = _common_limits(rows, count, first)
        if any_high <= 0 or any_low >= BLOCK:
            return False
        scores_of_block(count, q, keys, pointers + 64, item_bytes, head_size, weights)
        for i in range(count):
            start, stop = _limits(rows + _ROW_BYTES * i, first)
            soften(weights + 256 * i, start, stop, job.scale, job.soft_cap, pointers + 128, pointers + 160,
                   sums + 4 * i * head_size, lanes + 64 * i, tops + 4 * i, head_size)  # fmt: skip
        if low != any_low or high != any_high:
            _add_outside(rows, count, first, low, high, True, weights, values, sums, head_size)
        add_values(count, weights, values, pointers + 96, item_bytes, low, high, sums, head_size)
        if low != any_low or high != any_high:
            _add_outside(rows, count, first, low, high, False, weights, values, sums, head_size)
        return True

    @compiled
    def block(job, tile, first, rows, packed, state, pointers):
        row_bytes = 4 * job.head_size
        lanes = state + row_bytes * tile.num_rows
        tops = lanes + 64 * tile.num_rows
        for r in range(0, tile.num_rows, TILE):
            q, sums, count = packed + row_bytes * r, state + row_bytes * r, min(TILE, tile.num_rows - r)
            here = rows + _ROW_BYTES * r
            if tile_of_rows(job, here, count, first, q, sums, lanes + 64 * r, tops + 4 * r, pointers):
                _copy_blocks(pointers, pointers + 64)  # what was prefetched once is not again
                _copy_blocks(pointers + 32, pointers + 96)

    return block


def _span_with(load: Any, item_bytes: int, has_scales: bool) -> Any:
    """A compiled function: a span of keys for all rows of an item, starting with nothing.

    `state` gets, for the tile's rows, H sums of values each, then 16 sums of weights each, then the largest logits.
    """
    attend_block = _block_with(has_scales, item_bytes)
    widen = _widen_with(load, item_bytes) if load is not load_f32 else None
    widened_bytes = 2 * BLOCK * LARGEST_HEAD * 4 if load is not load_f32 else 8

    @compiled
    def widen_both(job, pointers, area):
        length = SUB * job.head_size
        if widen is not None:
            widen(pointers, length, area)
            widen(pointers + 32, length, area + 4 * BLOCK * job.head_size)

    @compiled
    def attend(job, tile, head, first, end, rows, packed, state, after):
        """Keys from `first`, a multiple of BLOCK, up to `end`, all of one span. `after`: blocks to prefetch last."""
        num_rows, head_size, (low, high) = tile.num_rows, job.head_size, _keys_seen(job, tile)
        for i in range(0, num_rows * (head_size + 16), 16):
            store_f32(state + 4 * i, splat_f32(f32(0.0)))
        for r in range(num_rows):
            store_f32s(state + 4 * (num_rows * (head_size + 16) + r), LOWEST)
        pointers, blocks, following, area = scratch(192), scratch(32), scratch(32), scratch(widened_bytes)
        group_bytes = SUB * head_size * item_bytes
        _find_blocks(job, tile, head, first, low, high, following)
        while first < end:
            _copy_blocks(following, blocks)
            if first + BLOCK < high:
                _find_blocks(job, tile, head, first + BLOCK, low, high, following)
            else:
                _copy_blocks(after, following)
            _addresses(blocks, job.k, group_bytes, pointers)
            _addresses(blocks, job.v, group_bytes, pointers + 32)
            _addresses(following, job.k, group_bytes, pointers + 64)
            _addresses(following, job.v, group_bytes, pointers + 96)
            if has_scales:
                _addresses(blocks, job.k_scale, 4 * SUB, pointers + 128)
                _addresses(blocks, job.v_scale, 4 * SUB, pointers + 160)
            widen_both(job, pointers, area)
            attend_block(job, tile, first, rows, packed, state, pointers)
            first += BLOCK

    return attend


@compiled
def _start_row(job, tile, head, rows, running):
    """Running sums of all rows before the first span: zeros in the output; in `running` a row's (total, top).

    A sink is a logit that is always there and carries no value.
    """
    for r in range(tile.num_rows):
        out = load_i64s(rows + _ROW_BYTES * r + _OUT)
        for h in range(0, job.head_size, 16):
            store_f32(out + 4 * h, splat_f32(f32(0.0)))
        sink = load_f32s(job.sinks + 4 * (head * job.group + (tile.first_row + r) % job.group))
        store_f32s(running + 8 * r, f32(0.0) if sink == MINUS_INFINITY else f32(1.0))
        store_f32s(running + 8 * r + 4, LOWEST if sink == MINUS_INFINITY else sink)


@compiled
def _merge(job, tile, rows, state, running):
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
        out, sums = load_i64s(rows + _ROW_BYTES * r + _OUT), state + 4 * r * head_size
        for h in range(0, head_size, 16):
            store_f32(out + 4 * h, fma(load_f32(sums + 4 * h), add, load_f32(out + 4 * h) * keep))


@compiled
def _finish(job, tile, rows, running):
    """Divides by the sum of weights."""
    for r in range(tile.num_rows):
        total, out = load_f32s(running + 8 * r), load_i64s(rows + _ROW_BYTES * r + _OUT)
        inverse = splat_f32(f32(0.0) if total == f32(0.0) else f32(1.0) / total)
        for h in range(0, job.head_size, 16):
            store_f32(out + 4 * h, load_f32(out + 4 * h) * inverse)


def _works_with(load: Any, item_bytes: int, has_scales: bool) -> Any:
    """Compiled functions `work(job, i)`: an item whole; one span of an item into `partials`; an item from its spans."""
    attend = _span_with(load, item_bytes, has_scales)
    rows_bytes, packed_bytes, running_bytes = ROWS * _ROW_BYTES, 4 * ROWS * LARGEST_HEAD, 8 * ROWS
    state_bytes = 4 * ROWS * (LARGEST_HEAD + 17) + 64

    @compiled
    def one_head(job, tile, head, after):
        rows, packed, running, state = (
            scratch(rows_bytes),
            scratch(packed_bytes),
            scratch(running_bytes),
            scratch(state_bytes),
        )
        low, high = _keys_seen(job, tile)
        _describe_rows(job, tile, head, rows)
        _pack(job, tile, rows, packed)
        _start_row(job, tile, head, rows, running)
        first = low // BLOCK * BLOCK
        while first < high:
            end = min(high, (first // SPAN + 1) * SPAN)
            attend(job, tile, head, first, end, rows, packed, state, after)
            _merge(job, tile, rows, state, running)
            first = end
        _finish(job, tile, rows, running)

    @compiled
    def whole(address, i):
        """Some tiles and kv heads, one after the other; each prefetches what the next begins with."""
        job, after = _job_at(address), scratch(32)
        items_per_tile = job.num_kv_heads // job.heads_per_item
        first_head = i % items_per_tile * job.heads_per_item
        # The last tiles see most keys: begun first, they do not keep one thread busy alone at the end.
        index = job.num_tiles - 1 - i // items_per_tile * job.tiles_per_item
        count = min(job.tiles_per_item, index + 1) * job.heads_per_item
        for n in range(count):
            tile, head = tile_at(job.tiles + TILE_BYTES * index), first_head + n % job.heads_per_item
            if (n + 1) % job.heads_per_item == 0:
                index -= 1
            if n + 1 < count:
                next_head = first_head + (n + 1) % job.heads_per_item
                _first_blocks(job, tile_at(job.tiles + TILE_BYTES * index), next_head, after)
            else:
                _first_blocks(job, tile, head, after)
            one_head(job, tile, head, after)

    @compiled
    def span(address, i):
        job = _job_at(address)
        item, index = i // job.num_spans, i % job.num_spans
        tile, head = tile_at(job.tiles + TILE_BYTES * (item // job.num_kv_heads)), item % job.num_kv_heads
        rows, packed, after = scratch(rows_bytes), scratch(packed_bytes), scratch(32)
        low, high = _keys_seen(job, tile)
        _describe_rows(job, tile, head, rows)
        _pack(job, tile, rows, packed)
        first, end = max(low // BLOCK * BLOCK, index * SPAN), min(high, (index + 1) * SPAN)
        if first < end:
            _find_blocks(job, tile, head, first, low, high, after)
            attend(job, tile, head, first, end, rows, packed, job.partials + i * job.partial_bytes, after)

    @compiled
    def merged(address, i):
        job = _job_at(address)
        tile, head = tile_at(job.tiles + TILE_BYTES * (i // job.num_kv_heads)), i % job.num_kv_heads
        rows, running = scratch(rows_bytes), scratch(running_bytes)
        low, high = _keys_seen(job, tile)
        _describe_rows(job, tile, head, rows)
        _start_row(job, tile, head, rows, running)
        for index in range(low // SPAN, (high + SPAN - 1) // SPAN):
            _merge(job, tile, rows, job.partials + (i * job.num_spans + index) * job.partial_bytes, running)
        _finish(job, tile, rows, running)

    return whole, span, merged


@compiled
def _add_tiles(job, table, first_token, num_queries, position, tiles, num_tiles):
    """Tiles of one sequence's queries, the first at `position`; returns how many there are now."""
    num_rows = num_queries * job.group
    for first_row in range(0, num_rows, ROWS):
        tile = tile_at(tiles + TILE_BYTES * num_tiles)
        tile.table, tile.first_token, tile.first_position = table, first_token, position
        tile.first_row, tile.num_rows = first_row, min(ROWS, num_rows - first_row)
        num_tiles += 1
    return num_tiles


@compiled
def cut(job, num_tokens, lengths, starts, num_sequences, table, tiles):
    """Fills `tiles`, zeros the output of tokens that do not exist. Returns (tiles, most keys of a sequence).

    Of the job: group, num_heads, head_size (of the output), out, page_size, max_pages.
    """
    num_tiles, longest, done = i64(0), i64(0), i64(0)
    token_bytes = 4 * job.num_heads * job.head_size
    for b in range(num_sequences):
        first, end, length = load_i32s(starts + 4 * b), load_i32s(starts + 4 * b + 4), load_i32s(lengths + 4 * b)
        exists = max(first, end - max(length, 0))  # positions below zero belong to padding
        if end > exists:
            _zero(job.out + done * token_bytes, (exists - done) * token_bytes)
            here = table + 4 * b * job.max_pages
            num_tiles = _add_tiles(job, here, exists, end - exists, length - (end - exists), tiles, num_tiles)
            longest, done = max(longest, min(length, job.max_pages * job.page_size)), end
    _zero(job.out + done * token_bytes, (num_tokens - done) * token_bytes)
    return num_tiles, longest


@compiled
def _zero(start, num_bytes):
    for i in range(0, num_bytes, 64):
        store_f32(start + i, splat_f32(f32(0.0)))


def _operand_checks(name: str, has_scales: bool) -> Any:
    """A compiled function that compares the sizes of what is not checked for cache writes too."""
    wrong_shape = f"{name}: q or the result does not fit the pages' heads: N = %lld, K = %lld, H = %lld"
    sinks_at = 9 if has_scales else 7

    @compiled
    def check(call):
        q, v, num_heads, num_kv_heads = arg(call, 0), arg(call, 2), dim(arg(call, 0), 1), dim(arg(call, 2), 2)
        good = same_dims(q, ret(call, 0), 3) and dim(q, 2) == dim(v, 4) and dim(arg(call, sinks_at), 0) == num_heads
        if not good or num_kv_heads == 0 or num_heads % num_kv_heads != 0:
            return fail(call, abi.INVALID_ARGUMENT, text(wrong_shape), num_heads, num_kv_heads, dim(v, 4))
        return OK

    return check


def _job_with(has_scales: bool) -> Any:
    """A compiled function that reads a checked call into a job."""
    first_layout = 5 if has_scales else 3

    @compiled
    def fill(call, job):
        q, k, v, table = arg(call, 0), arg(call, 1), arg(call, 2), arg(call, first_layout + 2)
        job.q, job.k, job.v, job.out = q.data, k.data, v.data, ret(call, 0).data
        if has_scales:
            job.k_scale, job.v_scale = arg(call, 3).data, arg(call, 4).data
        job.sinks = arg(call, first_layout + 4).data
        job.num_heads, job.num_kv_heads, job.head_size = dim(q, 1), dim(k, 2), dim(q, 2)
        job.group = job.num_heads // job.num_kv_heads
        job.num_pages, job.page_size, job.max_pages = dim(k, 1), dim(v, 3), dim(table, 1)
        job.layer = load_i32s(arg(call, first_layout + 3).data)
        job.scale, job.soft_cap, job.window = attr_f32(call, 0), attr_f32(call, 1), attr_i64(call, 2)

    return fill


def _target(name: str, dtype: int, load: Any, item_bytes: int) -> Any:
    """The FFI target for one dtype of the cache."""
    has_scales = dtype == abi.S8
    check, check_operands, fill = checks_of(name, has_scales), _operand_checks(name, has_scales), _job_with(has_scales)
    run_whole, run_spans, run_merge = (parallel(work) for work in _works_with(load, item_bytes, has_scales))
    no_memory = f"{name}: no memory for %lld bytes"
    first_layout = 5 if has_scales else 3

    @compiled
    def run(call, address):
        """Shares the spans of sequences out only where there are too few items to keep all threads busy."""
        job = _job_at(address)
        threads, num_items = num_threads(call), job.num_tiles * job.num_kv_heads
        if num_items >= 4 * threads or job.num_spans < 2 or threads == 1:
            job.heads_per_item = job.num_kv_heads if job.num_tiles >= 8 * threads else 1
            job.tiles_per_item = max(1, job.num_tiles // (8 * threads))
            num_shares = (job.num_tiles + job.tiles_per_item - 1) // job.tiles_per_item
            run_whole(call, address, num_shares * (job.num_kv_heads // job.heads_per_item))
            return OK
        most_rows = i64(0)
        for i in range(job.num_tiles):
            most_rows = max(most_rows, tile_at(job.tiles + TILE_BYTES * i).num_rows)
        job.partial_bytes = (4 * most_rows * (job.head_size + 17) + 63) // 64 * 64
        num_bytes = num_items * job.num_spans * job.partial_bytes
        job.partials = _malloc(num_bytes)
        if job.partials == 0:
            return fail(call, abi.INTERNAL, text(no_memory), num_bytes, 0, 0)
        run_spans(call, address, num_items * job.num_spans)
        run_merge(call, address, num_items)
        _free(job.partials)
        return OK

    @compiled
    def body(call):
        error = check(call, dim(arg(call, 0), 0))
        if error == OK:
            error = check_operands(call)
        if error != OK:
            return error
        address = stack(JOB_BYTES)
        job = _job_at(address)
        fill(call, job)
        num_tokens, lengths, starts = dim(arg(call, 0), 0), arg(call, first_layout), arg(call, first_layout + 1)
        table = arg(call, first_layout + 2)
        # Each sequence may leave its last tile unfilled.
        num_bytes = TILE_BYTES * (num_tokens * job.group // ROWS + min(num_tokens, dim(lengths, 0)) + 1)
        job.tiles = _malloc(num_bytes)
        if job.tiles == 0:
            return fail(call, abi.INTERNAL, text(no_memory), num_bytes, 0, 0)
        job.num_tiles, longest = cut(job, num_tokens, lengths.data, starts.data, dim(lengths, 0), table.data, job.tiles)
        job.num_spans = (longest + SPAN - 1) // SPAN
        if job.num_tiles > 0:
            error = run(call, address)
        _free(job.tiles)
        return error

    scales = [(abi.F32, 4), (abi.F32, 4)] if has_scales else []
    layout = [(abi.S32, 1), (abi.S32, 1), (abi.S32, 2)]
    return declare(
        name,
        body,
        args=[(abi.F32, 3), (dtype, 6), (dtype, 5), *scales, *layout, (abi.S32, 0), (abi.F32, 1)],
        rets=[(abi.F32, 3)],
        attrs={"scale": abi.F32, "soft_cap": abi.F32, "window": abi.S64},
    )


attend_float32 = _target("paged_attention float32", abi.F32, load_f32, 4)
attend_bfloat16 = _target("paged_attention bfloat16", abi.BF16, load_bf16, 2)
attend_int8 = _target("paged_attention int8", abi.S8, load_i8_as_f32, 1)
