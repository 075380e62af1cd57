"""The machine code that splits, norms and rotates heads and writes keys and values into the cache, in place.

Imported by the compiling child only: one FFI target for each dtype of the cache (see cpu.py for its layout). A token's
arithmetic does not depend on the others.
"""

from typing import Any

import numpy as np

from pallas_kernels.cpu import abi
from pallas_kernels.cpu.bridge import OK, arg, attr_f32, declare, dim, fail, ret
from pallas_kernels.cpu.memory import at, compiled, scratch, stack, text
from pallas_kernels.cpu.parallel import parallel
from pallas_kernels.cpu.simd import (
    f32,
    fma,
    i64,
    largest_magnitude,
    load_f32,
    load_i64s,
    round_even,
    splat_f32,
    store_f32,
    store_f32s,
    store_i32_as_i8,
    store_i64s,
    to_i32,
)
from pallas_kernels.cpu.simd_math import (
    copy_1_byte,
    copy_2_bytes,
    copy_4_bytes,
    hsum,
    load_f32s,
    load_i32s,
    square_root,
    store_bf16,
)
from pallas_kernels.paged_attention.cpu_checks_compiled import LARGEST_HEAD, SUB, checks_of, same_dims

_TOKENS_AT_ONCE = 16  # of an item of work, at most
_PARALLEL_VALUES = 16384  # from this many on, tokens are shared out to threads
_SMALLEST_PEAK = np.float32(2.0**-100)

_WORDS = (
    "qkv", "q", "k", "v", "k_scale", "v_scale", "slots", "cos", "sin", "q_norm", "k_norm", "num_tokens", "num_heads",
    "num_kv_heads", "head_size", "num_pairs", "page_size", "tokens_per_item",
)  # fmt: skip
_JOB = np.dtype([(word, np.int64) for word in _WORDS] + [("eps", np.float32)], align=True)
_JOB_BYTES = _JOB.itemsize
_job_at = at(_JOB)


@compiled
def _normed(x, weight, eps, head_size, out):
    """x / sqrt(mean(x^2) + eps) * weight."""
    squares = splat_f32(f32(0.0))
    for i in range(0, 4 * head_size, 64):
        squares = fma(load_f32(x + i), load_f32(x + i), squares)
    factor = splat_f32(f32(1.0) / square_root(hsum(squares) / f32(head_size) + eps))
    for i in range(0, 4 * head_size, 64):
        store_f32(out + i, load_f32(x + i) * factor * load_f32(weight + i))


@compiled
def _rotate(x, cos, sin, num_pairs):
    """Turns the pairs (i, i + num_pairs) by their angles, in place."""
    y, i = x + 4 * num_pairs, i64(0)
    while i + 16 <= num_pairs:
        at = 4 * i
        first, second, c, s = load_f32(x + at), load_f32(y + at), load_f32(cos + at), load_f32(sin + at)
        store_f32(x + at, first * c - second * s)
        store_f32(y + at, second * c + first * s)
        i += 16
    while i < num_pairs:
        at = 4 * i
        first, second, c, s = load_f32s(x + at), load_f32s(y + at), load_f32s(cos + at), load_f32s(sin + at)
        store_f32s(x + at, first * c - second * s)
        store_f32s(y + at, second * c + first * s)
        i += 1


@compiled
def _turned(job, x, norm, token, out):
    """A head at `out`, normed if `norm` is an address, and rotated."""
    if norm != 0:
        _normed(x, norm, job.eps, job.head_size, out)
    else:
        for i in range(0, 4 * job.head_size, 64):
            store_f32(out + i, load_f32(x + i))
    angles = 4 * token * job.num_pairs
    _rotate(out, job.cos + angles, job.sin + angles, job.num_pairs)


@compiled
def _round_float32(x, head_size, out):
    for i in range(0, head_size, 16):
        store_f32(out + 4 * i, load_f32(x + 4 * i))
    return f32(1.0)


@compiled
def _round_bfloat16(x, head_size, out):
    for i in range(0, head_size, 16):
        store_bf16(out + 2 * i, load_f32(x + 4 * i))
    return f32(1.0)


@compiled
def _round_int8(x, head_size, out):
    """Whole multiples of the returned scale, largest magnitude / 127; all zero when that is below 2^-100."""
    peak = f32(0.0)
    for i in range(0, 4 * head_size, 64):
        here = largest_magnitude(load_f32(x + i), load_f32(x + i))
        peak = peak if here <= peak else here  # NaN, once there, stays
    scale = peak / f32(127.0)
    inverse = splat_f32(f32(0.0) if peak < _SMALLEST_PEAK else f32(127.0) / peak)
    for i in range(0, head_size, 16):
        store_i32_as_i8(out + i, to_i32(round_even(load_f32(x + 4 * i) * inverse)))
    return f32(0.0) if peak < _SMALLEST_PEAK else scale


def _work_with(round_head: Any, copy_one: Any, item_bytes: int, has_scales: bool) -> Any:
    """A compiled function `work(job, i)`: the tokens of item i."""
    head_bytes, rounded_bytes = 4 * LARGEST_HEAD, item_bytes * LARGEST_HEAD

    @compiled
    def write(job, head, slot, key, value):
        """A token's key and value of one head at its slot, counted in positions of the whole cache array."""
        page, at = slot // job.page_size, slot % job.page_size
        row = (page * job.num_kv_heads + head) * job.page_size + at
        head_size, rounded = job.head_size, scratch(rounded_bytes)
        v_scale = round_head(value, head_size, job.v + row * head_size * item_bytes)
        k_scale = round_head(key, head_size, rounded)
        target = job.k + ((row // SUB) * SUB * head_size + at % SUB) * item_bytes
        for h in range(head_size):
            copy_one(target + h * SUB * item_bytes, rounded + h * item_bytes)
        if has_scales:
            store_f32s(job.k_scale + 4 * row, k_scale)
            store_f32s(job.v_scale + 4 * row, v_scale)

    @compiled
    def work(address, i):
        job, key = _job_at(address), scratch(head_bytes)
        size, num_heads, num_kv_heads = 4 * job.head_size, job.num_heads, job.num_kv_heads
        for token in range(i * job.tokens_per_item, min((i + 1) * job.tokens_per_item, job.num_tokens)):
            x, q = job.qkv + token * (num_heads + 2 * num_kv_heads) * size, job.q + token * num_heads * size
            for head in range(num_heads):
                _turned(job, x + head * size, job.q_norm, token, q + head * size)
            slot = load_i64s(job.slots + 8 * token)
            if slot >= 0:
                for head in range(num_kv_heads):
                    here = x + (num_heads + head) * size
                    _turned(job, here, job.k_norm, token, key)
                    write(job, head, slot, key, here + num_kv_heads * size)

    return work


@compiled
def find_slots(lengths, starts, table, layer, num_pages, page_size, num_tokens, slots):
    """Where each token is written, counted in positions of the whole cache; -1 for those that are dropped."""
    num_sequences, max_pages = dim(lengths, 0), dim(table, 1)
    for token in range(num_tokens):
        store_i64s(slots + 8 * token, -1)
    for b in range(num_sequences):
        first, end = load_i32s(starts.data + 4 * b), load_i32s(starts.data + 4 * b + 4)
        length = load_i32s(lengths.data + 4 * b)
        for token in range(first, end):
            position = length - (end - token)
            if position >= 0 and position < max_pages * page_size:
                page = load_i32s(table.data + 4 * (b * max_pages + position // page_size))
                if page >= 0 and page < num_pages:
                    slot = (layer * num_pages + page) * page_size + position % page_size
                    store_i64s(slots + 8 * token, slot)


def _operand_checks(name: str, has_scales: bool) -> Any:
    """A compiled function that compares the sizes of what attention does not have."""
    wrong_columns = f"{name}: qkv [%lld, %lld] does not fit the result's tokens and %lld heads"
    wrong_slots = f"{name}: %lld slots for %lld tokens"
    wrong_angles = f"{name}: cos and sin [%lld, %lld] do not fit the tokens or the head size %lld"
    wrong_norm = f"{name}: a norm of %lld values for a head of %lld"
    wrong_alias = f"{name}: the cache is not updated in place"
    arrays, layout = (4, 5) if has_scales else (2, 3)

    @compiled
    def check(call):
        qkv, v, q, slots = arg(call, 0), arg(call, 2), ret(call, 0), ret(call, arrays + 1)
        cos, sin = arg(call, layout + 4), arg(call, layout + 5)
        num_tokens, head_size = dim(qkv, 0), dim(v, 4)
        num_columns = (dim(q, 1) + 2 * dim(v, 2)) * head_size
        if dim(q, 0) != num_tokens or dim(q, 2) != head_size or dim(qkv, 1) != num_columns:
            return fail(call, abi.INVALID_ARGUMENT, text(wrong_columns), num_tokens, dim(qkv, 1), dim(q, 1))
        if dim(slots, 0) != 8 * num_tokens:
            return fail(call, abi.INVALID_ARGUMENT, text(wrong_slots), dim(slots, 0), num_tokens, 0)
        if not same_dims(cos, sin, 2) or dim(cos, 0) != num_tokens or 2 * dim(cos, 1) > head_size:
            return fail(call, abi.INVALID_ARGUMENT, text(wrong_angles), dim(cos, 0), dim(cos, 1), head_size)
        for i in range(2):
            size = dim(arg(call, layout + 6 + i), 0)
            if size != 0 and size != head_size:
                return fail(call, abi.INVALID_ARGUMENT, text(wrong_norm), size, head_size, 0)
        for i in range(1, arrays + 1):
            if arg(call, i).data != ret(call, i).data:
                return fail(call, abi.INVALID_ARGUMENT, text(wrong_alias), 0, 0, 0)
        return OK

    return check


def _job_with(has_scales: bool) -> Any:
    """A compiled function that reads a checked call into a job."""
    arrays, layout = (4, 5) if has_scales else (2, 3)

    @compiled
    def fill(call, job):
        qkv, v, q = arg(call, 0), arg(call, 2), ret(call, 0)
        job.qkv, job.q, job.k, job.v = qkv.data, q.data, arg(call, 1).data, v.data
        if has_scales:
            job.k_scale, job.v_scale = arg(call, 3).data, arg(call, 4).data
        job.slots = ret(call, arrays + 1).data
        job.cos, job.sin, job.num_pairs = (
            arg(call, layout + 4).data,
            arg(call, layout + 5).data,
            dim(arg(call, layout + 4), 1),
        )
        q_norm, k_norm = arg(call, layout + 6), arg(call, layout + 7)
        job.q_norm = q_norm.data if dim(q_norm, 0) > 0 else 0
        job.k_norm = k_norm.data if dim(k_norm, 0) > 0 else 0
        job.num_tokens, job.num_heads, job.num_kv_heads = dim(qkv, 0), dim(q, 1), dim(v, 2)
        job.head_size, job.page_size, job.eps = dim(v, 4), dim(v, 3), attr_f32(call, 0)

    return fill


def _target(name: str, dtype: int, round_head: Any, copy_one: Any, item_bytes: int) -> Any:
    """The FFI target for one dtype of the cache; its last result is a workspace of 8 bytes a token."""
    has_scales = dtype == abi.S8
    layout = 5 if has_scales else 3
    check, check_operands, fill = checks_of(name, has_scales), _operand_checks(name, has_scales), _job_with(has_scales)
    work = _work_with(round_head, copy_one, item_bytes, has_scales)
    run = parallel(work)

    @compiled
    def body(call):
        error = check(call, dim(arg(call, 0), 0))
        if error == OK:
            error = check_operands(call)
        if error != OK:
            return error
        address, lengths, starts = stack(_JOB_BYTES), arg(call, layout), arg(call, layout + 1)
        job = _job_at(address)
        fill(call, job)
        layer, num_pages = load_i32s(arg(call, layout + 3).data), dim(arg(call, 2), 1)
        table, num_tokens = arg(call, layout + 2), job.num_tokens
        find_slots(lengths, starts, table, layer, num_pages, job.page_size, num_tokens, job.slots)
        if num_tokens * dim(arg(call, 0), 1) < _PARALLEL_VALUES:
            job.tokens_per_item = max(num_tokens, 1)
            work(address, 0)
        else:
            job.tokens_per_item = min(_TOKENS_AT_ONCE, max(1, num_tokens // 8))
            run(call, address, (num_tokens + job.tokens_per_item - 1) // job.tokens_per_item)
        return OK

    cache = [(dtype, 6), (dtype, 5), *([(abi.F32, 4)] * 2 if has_scales else [])]
    layout_specs = [(abi.S32, 1), (abi.S32, 1), (abi.S32, 2), (abi.S32, 0)]
    return declare(
        name,
        body,
        args=[(abi.F32, 2), *cache, *layout_specs, (abi.F32, 2), (abi.F32, 2), (abi.F32, 1), (abi.F32, 1)],
        rets=[(abi.F32, 3), *cache, (abi.U8, 1)],
        attrs={"eps": abi.F32},
    )


rope_write_float32 = _target("rope_write_kv float32", abi.F32, _round_float32, copy_4_bytes, 4)
rope_write_bfloat16 = _target("rope_write_kv bfloat16", abi.BF16, _round_bfloat16, copy_2_bytes, 2)
rope_write_int8 = _target("rope_write_kv int8", abi.S8, _round_int8, copy_1_byte, 1)
