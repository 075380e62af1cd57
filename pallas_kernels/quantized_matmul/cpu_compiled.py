"""The machine code of tiled_matmul: one FFI target for each format (see tiles.py for the layout).

Imported by the compiling child only. A target takes x [T, I] float32 and the tiles, and fills the result [T, O] float32
and a workspace: T * I int8 activations, then for each block of 32 a float32 scale, then for each block one more word.
That word is the scaled sum of the block's quantized activations for formats with a minimum, and for the others
-zero * sum as an int32, with which the integer dot product starts.
"""

from typing import Any

import numpy as np

from pallas_kernels.cpu import abi
from pallas_kernels.cpu.bridge import OK, arg, declare, dim, fail, ret
from pallas_kernels.cpu.memory import at, compiled, stack, text
from pallas_kernels.cpu.parallel import parallel
from pallas_kernels.cpu.simd import (
    bit_to_16,
    dot_u8i8,
    f32,
    fma,
    high_nibbles,
    hsum_i32,
    i32,
    largest_magnitude,
    load_f16,
    load_f32,
    load_u8,
    low_nibbles,
    or_u8,
    repeat,
    replace,
    round_even,
    splat_f32,
    splat_i32,
    splat_load_f32,
    splat_load_i8x4,
    splat_load_i32,
    store_f32,
    store_f32s,
    store_i32_as_i8,
    store_i32s,
    to_f32,
    to_i32,
)
from pallas_kernels.quantized_matmul.tiles import BLOCK_LENGTH, GROUP_LENGTH, TILE_FORMATS, TileFormat

_SMALLEST_PEAK = np.float32(2.0**-100)
_PARALLEL_ACTIVATIONS = 8192  # from this many on, activations are quantized in parallel

_WORDS = ("x", "tiles", "quants", "scales", "sums", "out", "num_rows", "num_outputs", "num_blocks", "groups_per_item")
_JOB = np.dtype([(word, np.int64) for word in _WORDS])
_job_at = at(_JOB)


@compiled
def _nibbles(p):
    """The eight vectors of a 4-bit block at p: inputs 4q to 4q + 3 of 16 outputs in vector q."""
    a, b, c, d = load_u8(p), load_u8(p + 64), load_u8(p + 128), load_u8(p + 192)
    return (
        low_nibbles(a), low_nibbles(b), low_nibbles(c), low_nibbles(d),
        high_nibbles(a), high_nibbles(b), high_nibbles(c), high_nibbles(d),
    )  # fmt: skip


_bit0, _bit1, _bit2, _bit3, _bit4, _bit5, _bit6, _bit7 = (bit_to_16(bit) for bit in range(8))


@compiled
def _five_bits(p):
    """As `_nibbles`, of a 5-bit block."""
    v, high = _nibbles(p), load_u8(p + 256)
    return (
        or_u8(v[0], _bit0(high)), or_u8(v[1], _bit1(high)), or_u8(v[2], _bit2(high)), or_u8(v[3], _bit3(high)),
        or_u8(v[4], _bit4(high)), or_u8(v[5], _bit5(high)), or_u8(v[6], _bit6(high)), or_u8(v[7], _bit7(high)),
    )  # fmt: skip


@compiled
def _bytes(p):
    """As `_nibbles`, of an 8-bit block."""
    return (
        load_u8(p), load_u8(p + 64), load_u8(p + 128), load_u8(p + 192),
        load_u8(p + 256), load_u8(p + 320), load_u8(p + 384), load_u8(p + 448),
    )  # fmt: skip


_VECTORS = {4: _nibbles, 5: _five_bits, 8: _bytes}


@compiled
def _dot(start, weights, x):
    """start + the exact integer products of one block of 16 outputs with the 32 activations at x."""
    a = dot_u8i8(start, weights[0], splat_load_i8x4(x))
    b = dot_u8i8(splat_i32(i32(0)), weights[1], splat_load_i8x4(x + 4))
    a = dot_u8i8(a, weights[2], splat_load_i8x4(x + 8))
    b = dot_u8i8(b, weights[3], splat_load_i8x4(x + 12))
    a = dot_u8i8(a, weights[4], splat_load_i8x4(x + 16))
    b = dot_u8i8(b, weights[5], splat_load_i8x4(x + 20))
    a = dot_u8i8(a, weights[6], splat_load_i8x4(x + 24))
    b = dot_u8i8(b, weights[7], splat_load_i8x4(x + 28))
    return a + b


def _accumulate_with(fmt: TileFormat) -> Any:
    """A compiled function that adds one block's products to the sums of one row."""

    @compiled
    def with_minimum(acc, weights, scales, x, x_scale, x_sum):
        dot = to_f32(_dot(splat_i32(i32(0)), weights, x)) * splat_load_f32(x_scale)
        return fma(load_f16(scales + 32), splat_load_f32(x_sum), fma(dot, load_f16(scales), acc))

    @compiled
    def with_zero(acc, weights, scales, x, x_scale, x_sum):
        dot = to_f32(_dot(splat_load_i32(x_sum), weights, x)) * splat_load_f32(x_scale)
        return fma(dot, load_f16(scales), acc)

    return with_minimum if fmt.has_minimum else with_zero


def _tile_of(fmt: TileFormat, num_rows: int) -> Any:
    """A compiled function: the products of `num_rows` rows with one group of 16 outputs.

    Each row's arithmetic is the same for any number of rows, so that a row's result does not depend on the others.
    """
    vectors, accumulate = _VECTORS[fmt.bits], _accumulate_with(fmt)
    quant_bytes, scale_bytes = fmt.quant_bytes, fmt.scale_bytes

    @compiled
    def tile(group, num_blocks, x, x_scales, x_sums, out, num_outputs):
        acc = repeat(splat_f32(f32(0.0)), num_rows)
        group_scales = group + num_blocks * quant_bytes
        for k in range(num_blocks):
            weights = vectors(group + k * quant_bytes)
            scales = group_scales + k * scale_bytes
            for m in range(num_rows):
                at = m * num_blocks + k
                x_k = x + BLOCK_LENGTH * at
                acc = replace(acc, m, accumulate(acc[m], weights, scales, x_k, x_scales + 4 * at, x_sums + 4 * at))
        for m in range(num_rows):
            store_f32(out + 4 * m * num_outputs, acc[m])

    return tile


def _group_work(fmt: TileFormat) -> Any:
    """A compiled function `work(job, i)`: item i's groups of outputs, all rows."""
    tile1, tile4, tile8 = (_tile_of(fmt, num_rows) for num_rows in (1, 4, 8))
    block_bytes = fmt.quant_bytes + fmt.scale_bytes

    @compiled
    def work(address, i):
        job = _job_at(address)
        num_outputs, num_blocks, per_item = job.num_outputs, job.num_blocks, job.groups_per_item
        for g in range(i * per_item, min((i + 1) * per_item, num_outputs // GROUP_LENGTH)):
            group, m = job.tiles + g * num_blocks * block_bytes, 0
            while m < job.num_rows:
                at = m * num_blocks
                x, scales, sums = job.quants + at * BLOCK_LENGTH, job.scales + 4 * at, job.sums + 4 * at
                out = job.out + 4 * (m * num_outputs + g * GROUP_LENGTH)
                if m + 8 <= job.num_rows:
                    tile8(group, num_blocks, x, scales, sums, out, num_outputs)
                    m += 8
                elif m + 4 <= job.num_rows:
                    tile4(group, num_blocks, x, scales, sums, out, num_outputs)
                    m += 4
                else:
                    tile1(group, num_blocks, x, scales, sums, out, num_outputs)
                    m += 1

    return work


def _row_work(fmt: TileFormat) -> Any:
    """A compiled function `work(job, i)`: quantizes row i of the activations, block by block, to int8."""
    has_minimum, zero = fmt.has_minimum, fmt.zero

    @compiled
    def quantize(x, quants, scale, total):
        a, b = load_f32(x), load_f32(x + 64)
        peak = largest_magnitude(a, b)
        inverse = f32(127.0) / peak if peak >= _SMALLEST_PEAK else f32(0.0)
        a_quants = to_i32(round_even(a * splat_f32(inverse)))
        b_quants = to_i32(round_even(b * splat_f32(inverse)))
        store_i32_as_i8(quants, a_quants)
        store_i32_as_i8(quants + 16, b_quants)
        step = peak / f32(127.0)
        store_f32s(scale, step)
        whole = hsum_i32(a_quants + b_quants)
        if has_minimum:
            store_f32s(total, step * f32(whole))
        else:
            store_i32s(total, i32(-zero * whole))

    @compiled
    def work(address, i):
        job = _job_at(address)
        for k in range(i * job.num_blocks, (i + 1) * job.num_blocks):
            quantize(job.x + 4 * BLOCK_LENGTH * k, job.quants + BLOCK_LENGTH * k, job.scales + 4 * k, job.sums + 4 * k)

    return work


def _checks(fmt: TileFormat, name: str) -> Any:
    """A compiled function that compares all sizes of a call."""
    wrong_sizes = f"{name}: {GROUP_LENGTH} must divide the outputs, {BLOCK_LENGTH} the inputs; x [%lld, %lld], O = %lld"
    wrong_rows = f"{name}: x has %lld rows, the result %lld"
    wrong_tiles = f"{name}: tiles of %lld bytes, expected %lld for this O and I"
    wrong_workspace = f"{name}: workspace of %lld bytes, expected %lld"
    block_bytes = fmt.quant_bytes + fmt.scale_bytes

    @compiled
    def check(call, num_rows, num_inputs, num_outputs):
        num_blocks = num_inputs // BLOCK_LENGTH
        if num_inputs % BLOCK_LENGTH != 0 or num_outputs % GROUP_LENGTH != 0:
            return fail(call, abi.INVALID_ARGUMENT, text(wrong_sizes), num_rows, num_inputs, num_outputs)
        out_rows = dim(ret(call, 0), 0)
        if out_rows != num_rows:
            return fail(call, abi.INVALID_ARGUMENT, text(wrong_rows), num_rows, out_rows, 0)
        tile_bytes, expected = dim(arg(call, 1), 0), num_outputs // GROUP_LENGTH * num_blocks * block_bytes
        if tile_bytes != expected:
            return fail(call, abi.INVALID_ARGUMENT, text(wrong_tiles), tile_bytes, expected, 0)
        workspace, expected = dim(ret(call, 1), 0), num_rows * num_blocks * (BLOCK_LENGTH + 8)
        if workspace != expected:
            return fail(call, abi.INVALID_ARGUMENT, text(wrong_workspace), workspace, expected, 0)
        return OK

    return check


def _target(fmt: TileFormat) -> Any:
    """The FFI target of one format."""
    name = f"tiled_matmul {fmt.name}"
    check, quantize_row, multiply_groups = _checks(fmt, name), _row_work(fmt), _group_work(fmt)
    quantize_rows, multiply = parallel(quantize_row), parallel(multiply_groups)
    assert _JOB.itemsize == 80, "stack() takes a literal"

    @compiled
    def body(call):
        x, out = arg(call, 0), ret(call, 0)
        num_rows, num_inputs, num_outputs = dim(x, 0), dim(x, 1), dim(out, 1)
        error = check(call, num_rows, num_inputs, num_outputs)
        if error != OK:
            return error
        address, num_blocks, num_groups = stack(80), num_inputs // BLOCK_LENGTH, num_outputs // GROUP_LENGTH
        job = _job_at(address)
        job.x, job.tiles, job.out = x.data, arg(call, 1).data, out.data
        job.quants = ret(call, 1).data
        job.scales = job.quants + num_rows * num_inputs
        job.sums = job.scales + 4 * num_rows * num_blocks
        job.num_rows, job.num_outputs, job.num_blocks = num_rows, num_outputs, num_blocks
        job.groups_per_item = max(2, min(32, num_groups // 8))
        if num_rows * num_inputs < _PARALLEL_ACTIVATIONS:
            for i in range(num_rows):
                quantize_row(address, i)
        else:
            quantize_rows(call, address, num_rows)
        multiply(call, address, (num_groups + job.groups_per_item - 1) // job.groups_per_item)
        return OK

    operands = [(abi.F32, 2), (abi.U8, 1)]
    return declare(name, body, args=operands, rets=operands)


q4_0, q4_1, q5_0, q5_1, q8_0 = (_target(TILE_FORMATS[name]) for name in ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"))
