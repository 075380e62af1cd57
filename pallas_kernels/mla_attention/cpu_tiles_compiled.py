"""Register tiles of MLA: products of a few query heads with keys that lie in rows, weighted sums of the same rows.

Machine code, imported by the compiling child only. A row of the cache is loaded once for a tile of heads, whose sums
stay in registers. A head's arithmetic is the same in a tile of any number of heads.
"""

from typing import Any

from llvmlite import ir
from numba import types

from pallas_kernels.cpu.memory import compiled, intrinsic
from pallas_kernels.cpu.simd import _shuffle, _store, f32, load_i64s, repeat, splat_f32
from pallas_kernels.cpu.simd_math import _fma, add_products, load_tile, prefetch, store_tile
from pallas_kernels.paged_attention.cpu_checks_compiled import SUB
from pallas_kernels.paged_attention.cpu_tiles_compiled import BLOCK, TILE

# Four groups of SUB rows make a block; of each, int64 both: the address of its first row, bytes from row to row.
GROUP_BYTES, BLOCK_GROUPS_BYTES = 16, 64
WEIGHTS_BYTES = 4 * BLOCK  # of a head
_KEYS = 4  # keys of a tile of products


@intrinsic
def _add_outer(context, tile, q, keys):
    """tile[r][n] + q[r] * keys[n], lane by lane, by fma."""

    def lower(c, b, sig, args):
        values, q_values, key_values = args
        sums = []
        for r in range(len(q)):
            for n in range(len(keys)):
                old = b.extract_value(values, r * len(keys) + n)
                sums.append(_fma(b, b.extract_value(key_values, n), b.extract_value(q_values, r), old))
        return c.make_tuple(b, tile, sums)

    return tile(tile, q, keys), lower


def _sums_of_lanes(b: Any, vectors: list[Any]) -> Any:
    """One vector: the sum of each vector's lanes. Lanes i and i + width / 2 are added first, as `hsum` does."""
    num_sums, width = 1, 16  # what each vector holds: so many sums, each in so many lanes
    while width > 1:
        half = width // 2
        lows = [s * width + i for s in range(num_sums) for i in range(half)]
        pairs = list(zip(vectors[::2], vectors[1::2], strict=True)) if len(vectors) > 1 else []
        if pairs:
            lows, num_sums = lows + [16 + i for i in lows], 2 * num_sums
        highs = [i + half for i in lows]
        pairs = pairs or [(vectors[0], vectors[0])]
        vectors = [b.fadd(_shuffle(b, x, y, lows), _shuffle(b, x, y, highs)) for x, y in pairs]
        width = half
    return vectors[0]


@intrinsic
def _store_sums(context, out, tile):
    """The sums of the lanes of a tile, four to a row, rows WEIGHTS_BYTES apart."""

    def lower(c, b, sig, args):
        sums = _sums_of_lanes(b, [b.extract_value(args[1], i) for i in range(len(tile))])
        for r in range(len(tile) // _KEYS):
            place = b.add(args[0], ir.Constant(ir.IntType(64), WEIGHTS_BYTES * r))
            _store(b, place, _shuffle(b, sums, sums, range(_KEYS * r, _KEYS * r + _KEYS)))
        return c.get_dummy_value()

    return types.void(types.int64, tile), lower


def _scores_of(load: Any, item_bytes: int, num_heads: int) -> Any:
    """A compiled function: products of `num_heads` queries, q_bytes apart, with four keys, `stride` bytes apart."""
    num_sums = _KEYS * num_heads

    @compiled
    def scores(q, q_bytes, key, stride, size, out):
        k1, k2, k3 = key + stride, key + 2 * stride, key + 3 * stride
        acc = repeat(splat_f32(f32(0.0)), num_sums)
        for h in range(0, size, 16):
            at = item_bytes * h
            keys = (load(key + at), load(k1 + at), load(k2 + at), load(k3 + at))
            acc = _add_outer(acc, load_tile(q + 4 * h, q_bytes, num_heads, 1), keys)
        _store_sums(out, acc)

    return scores


def _values_of(load: Any, item_bytes: int, num_heads: int, num_vectors: int) -> Any:
    """A compiled function: adds `seen` weighted rows of a block, from `column` on, to `num_heads` sums."""
    step = 16 * item_bytes

    @compiled
    def four(value):
        return load(value), load(value + step), load(value + 2 * step), load(value + 3 * step)

    @compiled
    def one(value):
        return (load(value),)

    columns_at = {4: four, 1: one}[num_vectors]

    @compiled
    def add(weights, groups, seen, column, sums, sums_bytes):
        acc = load_tile(sums + 4 * column, sums_bytes, num_heads, num_vectors)
        for j in range((seen + SUB - 1) // SUB):
            group, weight = groups + GROUP_BYTES * j, weights + 4 * SUB * j
            value, stride = load_i64s(group) + item_bytes * column, load_i64s(group + 8)
            for _ in range(min(seen - SUB * j, SUB)):
                acc = add_products(acc, columns_at(value), weight, WEIGHTS_BYTES)
                value, weight = value + stride, weight + 4
        store_tile(sums + 4 * column, sums_bytes, num_heads, num_vectors, acc)

    return add


def scores_with(load: Any, item_bytes: int) -> Any:
    """A compiled function: products of TILE heads or one with four keys."""
    many, single = _scores_of(load, item_bytes, TILE), _scores_of(load, item_bytes, 1)

    @compiled
    def scores(num_heads, q, q_bytes, key, stride, size, out):
        if num_heads == TILE:
            many(q, q_bytes, key, stride, size, out)
        else:
            single(q, q_bytes, key, stride, size, out)

    return scores


def values_with(load: Any, item_bytes: int) -> tuple[Any, Any]:
    """Compiled functions that add weighted rows to the sums of TILE heads or one: 64 columns, 16 columns."""

    def of_width(num_vectors: int) -> Any:
        many, single = (_values_of(load, item_bytes, heads, num_vectors) for heads in (TILE, 1))

        @compiled
        def add(num_heads, weights, groups, seen, column, sums, sums_bytes):
            if num_heads == TILE:
                many(weights, groups, seen, column, sums, sums_bytes)
            else:
                single(weights, groups, seen, column, sums, sums_bytes)

        return add

    return of_width(4), of_width(1)


@compiled
def prefetch_keys(key, stride, num_bytes):
    """Asks for four rows."""
    for line in range(0, num_bytes, 64):
        prefetch(key + line)
        prefetch(key + stride + line)
        prefetch(key + 2 * stride + line)
        prefetch(key + 3 * stride + line)
