"""Register tiles of paged attention: products of a few rows with a block of keys, softmax weights, sums of values.

Machine code, imported by the compiling child only. A row's arithmetic is the same in a tile of any number of rows.
"""

from typing import Any

import numpy as np

from pallas_kernels.cpu.memory import compiled
from pallas_kernels.cpu.simd import (
    f32,
    load_f32,
    load_i64s,
    repeat,
    replace,
    splat_f32,
    store_f32,
    store_f32s,
    target_has,
)
from pallas_kernels.cpu.simd_math import (
    add_products,
    divide,
    exp,
    hmax,
    keep_between,
    larger,
    load_f32s,
    load_tile,
    prefetch,
    store_tile,
    tanh,
)
from pallas_kernels.paged_attention.cpu_checks_compiled import SUB

BLOCK = 64  # keys of one step of the running softmax
# Rows of a tile of registers: with 16 values a vector, 4 x 4 sums fill half the 32 registers of AVX-512.
TILE = 4 if target_has("avx512f") else 1
MINUS_INFINITY = f32(-np.inf)


def _scores_of(num_rows: int) -> Any:
    """A compiled function: products of `num_rows` packed queries with a block of keys.

    `keys` holds the addresses of four groups of 16 keys, `ahead` of those to prefetch meanwhile, in which a value has
    `ahead_bytes`.
    """

    num_sums = 4 * num_rows

    @compiled
    def scores(q, keys, ahead, ahead_bytes, head_size, out):
        k0, k1, k2, k3 = load_i64s(keys), load_i64s(keys + 8), load_i64s(keys + 16), load_i64s(keys + 24)
        a0, a1, a2, a3 = load_i64s(ahead), load_i64s(ahead + 8), load_i64s(ahead + 16), load_i64s(ahead + 24)
        acc = repeat(splat_f32(f32(0.0)), num_sums)
        for h in range(head_size):
            at = 64 * h
            line = 16 * ahead_bytes * h
            prefetch(a0 + line)
            prefetch(a1 + line)
            prefetch(a2 + line)
            prefetch(a3 + line)
            key = (load_f32(k0 + at), load_f32(k1 + at), load_f32(k2 + at), load_f32(k3 + at))
            acc = add_products(acc, key, q + 4 * TILE * h, 4)
        store_tile(out, 256, num_rows, 4, acc)

    return scores


def _values_of(num_rows: int, num_vectors: int) -> Any:
    """A compiled function: adds the weighted values t0 <= t < t1 of a block to `num_rows` sums, 16 * num_vectors wide.

    `values` and `ahead` as `keys` in `_scores_of`; all addresses are shifted by `column` values.
    """

    @compiled
    def add(weights, values, ahead, ahead_bytes, column, t0, t1, sums, head_size):
        row_bytes = 4 * head_size
        acc = load_tile(sums + 4 * column, row_bytes, num_rows, num_vectors)
        for j in range(t0 // SUB, (t1 + SUB - 1) // SUB):
            value = load_i64s(values + 8 * j) + 4 * column
            first, last = max(t0 - SUB * j, 0), min(t1 - SUB * j, SUB)
            line = load_i64s(ahead + 8 * j) + (first * head_size + column) * ahead_bytes
            value, weight = value + first * row_bytes, weights + 64 * j + 4 * first
            for _ in range(last - first):
                for n in range(num_vectors):
                    prefetch(line + 16 * ahead_bytes * n)
                acc = add_products(acc, load_tile(value, 0, 1, num_vectors), weight, 256)
                value, weight, line = value + row_bytes, weight + 4, line + head_size * ahead_bytes
        store_tile(sums + 4 * column, row_bytes, num_rows, num_vectors, acc)

    return add


def _all_values_of(num_rows: int) -> Any:
    """A compiled function: `_values_of` over all columns of the head."""
    wide, narrow = _values_of(num_rows, 4), _values_of(num_rows, 1)

    @compiled
    def add(weights, values, ahead, ahead_bytes, t0, t1, sums, head_size):
        if t1 <= t0:
            return
        column = 0
        while column + 64 <= head_size:
            wide(weights, values, ahead, ahead_bytes, column, t0, t1, sums, head_size)
            column += 64
        while column < head_size:
            narrow(weights, values, ahead, ahead_bytes, column, t0, t1, sums, head_size)
            column += 16

    return add


def _by_rows(function_of: Any) -> tuple[Any, ...]:
    """Functions for 1 .. 4 rows; those that no tile has are the one for 1."""
    return tuple(function_of(rows if rows <= TILE else 1) for rows in (1, 2, 3, 4))


_scores1, _scores2, _scores3, _scores4 = _by_rows(_scores_of)
add_row_values, _values2, _values3, _values4 = _by_rows(_all_values_of)


@compiled
def scores_of_block(num_rows, q, keys, ahead, ahead_bytes, head_size, out):
    if num_rows == 4:
        _scores4(q, keys, ahead, ahead_bytes, head_size, out)
    elif num_rows == 3:
        _scores3(q, keys, ahead, ahead_bytes, head_size, out)
    elif num_rows == 2:
        _scores2(q, keys, ahead, ahead_bytes, head_size, out)
    else:
        _scores1(q, keys, ahead, ahead_bytes, head_size, out)


@compiled
def add_values(num_rows, weights, values, ahead, ahead_bytes, t0, t1, sums, head_size):
    if num_rows == 4:
        _values4(weights, values, ahead, ahead_bytes, t0, t1, sums, head_size)
    elif num_rows == 3:
        _values3(weights, values, ahead, ahead_bytes, t0, t1, sums, head_size)
    elif num_rows == 2:
        _values2(weights, values, ahead, ahead_bytes, t0, t1, sums, head_size)
    else:
        add_row_values(weights, values, ahead, ahead_bytes, t0, t1, sums, head_size)


@compiled
def _capped(x, soft_cap):
    cap = splat_f32(soft_cap)
    return cap * tanh(divide(x, cap))


def soften_with(has_scales: bool) -> Any:
    """A compiled function that turns a row's products into weights relative to the largest logit so far.

    Shrinks what was summed before when that is a new one. `lanes`: the row's sixteen sums of weights; `top`: address
    of its largest logit; scales: addresses of those of the block's keys and values, if `has_scales`.
    """

    @compiled
    def soften(weights, low, high, scale, soft_cap, k_scales, v_scales, sums, lanes, top, head_size):
        s = repeat(splat_f32(scale), 4)
        for j in range(4):
            x = load_f32(weights + 64 * j) * splat_f32(scale)
            if has_scales:
                x = x * load_f32(load_i64s(k_scales + 8 * j))
            if soft_cap != f32(0.0):
                x = _capped(x, soft_cap)
            s = replace(s, j, keep_between(x, low - SUB * j, high - SUB * j, MINUS_INFINITY))
        old = load_f32s(top)
        new = hmax(larger(larger(s[0], s[1]), larger(s[2], s[3])))
        if new > old:
            shrink = exp(splat_f32(old - new))
            store_f32(lanes, load_f32(lanes) * shrink)
            for h in range(0, head_size, 16):
                store_f32(sums + 4 * h, load_f32(sums + 4 * h) * shrink)
            store_f32s(top, new)
        else:
            new = old
        total = load_f32(lanes)
        for j in range(4):
            w = exp(s[j] - splat_f32(new))
            w = keep_between(w, low - SUB * j, high - SUB * j, f32(0.0))
            total = total + w
            if has_scales:
                w = w * load_f32(load_i64s(v_scales + 8 * j))
            store_f32(weights + 64 * j, w)
        store_f32(lanes, total)

    return soften
