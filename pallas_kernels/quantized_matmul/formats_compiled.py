"""How the kernel reads each format: the vectors of a block, its scales, the products of a row with both.

Imported by the compiling child only. A scale or a minimum is a vector of 16 float32, one for each output.
"""

from typing import Any

from pallas_kernels.cpu.memory import compiled
from pallas_kernels.cpu.simd import (
    bit_to_16,
    bits_to_16,
    dot_above_128,
    dot_small_u8i8,
    dot_u8i8,
    f32,
    fma,
    has_dot_u8i8,
    high_nibbles,
    i32,
    load_bf16,
    load_f16,
    load_f32,
    load_i8_as_f32,
    load_u8,
    load_u8_as_f32,
    low_nibbles,
    or_u8,
    splat_f32,
    splat_i32,
    splat_load_f32,
    splat_load_i8x4,
    splat_load_i32,
    to_f32,
)
from pallas_kernels.quantized_matmul.tiles import TileFormat

# Where a record (rows.py) has what follows its 32 int8.
STEP, SUM, SECOND_SUM = 32, 36, 40


@compiled
def _nibbles(p):
    """The eight vectors of a 4-bit block at p: inputs 4q to 4q + 3 of 16 outputs in vector q."""
    a, b, c, d = load_u8(p), load_u8(p + 64), load_u8(p + 128), load_u8(p + 192)
    return (
        low_nibbles(a), low_nibbles(b), low_nibbles(c), low_nibbles(d),
        high_nibbles(a), high_nibbles(b), high_nibbles(c), high_nibbles(d),
    )  # fmt: skip


_bit0, _bit1, _bit2, _bit3, _bit4, _bit5, _bit6, _bit7 = (bit_to_16(bit) for bit in range(8))
_pair0, _pair1, _pair2, _pair3 = (bits_to_16(pair) for pair in range(4))


@compiled
def _five_bits(p):
    """As `_nibbles`, of a 5-bit block."""
    v, high = _nibbles(p), load_u8(p + 256)
    return (
        or_u8(v[0], _bit0(high)), or_u8(v[1], _bit1(high)), or_u8(v[2], _bit2(high)), or_u8(v[3], _bit3(high)),
        or_u8(v[4], _bit4(high)), or_u8(v[5], _bit5(high)), or_u8(v[6], _bit6(high)), or_u8(v[7], _bit7(high)),
    )  # fmt: skip


@compiled
def _six_bits(p):
    """As `_nibbles`, of a 6-bit block."""
    v, a, b = _nibbles(p), load_u8(p + 256), load_u8(p + 320)
    return (
        or_u8(v[0], _pair0(a)), or_u8(v[1], _pair1(a)), or_u8(v[2], _pair2(a)), or_u8(v[3], _pair3(a)),
        or_u8(v[4], _pair0(b)), or_u8(v[5], _pair1(b)), or_u8(v[6], _pair2(b)), or_u8(v[7], _pair3(b)),
    )  # fmt: skip


@compiled
def _bytes(p):
    """As `_nibbles`, of an 8-bit block."""
    return (
        load_u8(p), load_u8(p + 64), load_u8(p + 128), load_u8(p + 192),
        load_u8(p + 256), load_u8(p + 320), load_u8(p + 384), load_u8(p + 448),
    )  # fmt: skip


VECTORS = {4: _nibbles, 5: _five_bits, 6: _six_bits, 8: _bytes}


def _dots(dot_product: Any) -> tuple[Any, Any]:
    """Compiled functions: start + the exact integer products of one block of 16 outputs with the 32 activations at x;
    the products of the inputs 0 to 15 and of 16 to 31 with a record.

    Two chains of sums: one would leave the CPU waiting for its own results.
    """

    @compiled
    def of_block(start, weights, x):
        a = dot_product(start, weights[0], splat_load_i8x4(x))
        b = dot_product(splat_i32(i32(0)), weights[1], splat_load_i8x4(x + 4))
        a = dot_product(a, weights[2], splat_load_i8x4(x + 8))
        b = dot_product(b, weights[3], splat_load_i8x4(x + 12))
        a = dot_product(a, weights[4], splat_load_i8x4(x + 16))
        b = dot_product(b, weights[5], splat_load_i8x4(x + 20))
        a = dot_product(a, weights[6], splat_load_i8x4(x + 24))
        b = dot_product(b, weights[7], splat_load_i8x4(x + 28))
        return a + b

    @compiled
    def of_halves(weights, record):
        a = dot_product(splat_load_i32(record + SUM), weights[0], splat_load_i8x4(record))
        b = dot_product(splat_load_i32(record + SECOND_SUM), weights[4], splat_load_i8x4(record + 16))
        a = dot_product(a, weights[1], splat_load_i8x4(record + 4))
        b = dot_product(b, weights[5], splat_load_i8x4(record + 20))
        a = dot_product(a, weights[2], splat_load_i8x4(record + 8))
        b = dot_product(b, weights[6], splat_load_i8x4(record + 24))
        a = dot_product(a, weights[3], splat_load_i8x4(record + 12))
        b = dot_product(b, weights[7], splat_load_i8x4(record + 28))
        return to_f32(a), to_f32(b)

    return of_block, of_halves


_SMALL, _WHOLE_BYTES = _dots(dot_small_u8i8), _dots(dot_u8i8 if has_dot_u8i8() else dot_above_128)


def zero_of(fmt: TileFormat) -> int:
    """What the sum of a block's activations is to be multiplied with; nothing where the dot product has done it."""
    return 0 if fmt.bits == 8 and not has_dot_u8i8() else fmt.zero


def add_block_of(fmt: TileFormat) -> Any:
    """A compiled function: the sums of one row, with one block's products added."""
    dot_of_block, dot_of_halves = _WHOLE_BYTES if fmt.bits == 8 else _SMALL

    @compiled
    def with_minimum(acc, weights, scales, record):
        dot = to_f32(dot_of_block(splat_i32(i32(0)), weights, record)) * splat_load_f32(record + STEP)
        return fma(scales[1], splat_load_f32(record + SUM), fma(dot, scales[0], acc))

    @compiled
    def with_zero(acc, weights, scales, record):
        dot = to_f32(dot_of_block(splat_load_i32(record + SUM), weights, record)) * splat_load_f32(record + STEP)
        return fma(dot, scales[0], acc)

    @compiled
    def with_halves(acc, weights, scales, record):
        first, second = dot_of_halves(weights, record)
        return fma(fma(second, scales[1], first * scales[0]), splat_load_f32(record + STEP), acc)

    @compiled
    def without_scales(acc, weights, scales, record):
        return fma(
            to_f32(dot_of_block(splat_load_i32(record + SUM), weights, record)), splat_load_f32(record + STEP), acc
        )

    if fmt.scales == "super_block_halves":
        return with_halves
    if fmt.scales == "row":
        return without_scales
    return with_minimum if fmt.has_minimum else with_zero


@compiled
def _one():
    return splat_f32(f32(1.0))


def scales_of(fmt: TileFormat) -> tuple[Any, Any, Any]:
    """Compiled functions: what a span's section at p says, the scales and minima of a block from that and the block's
    section at p, and the sums of a row, times what was left out so far."""

    @compiled
    def nothing(p):
        return (_one(), _one())

    @compiled
    def half(p):
        return (load_f16(p), _one())

    @compiled
    def two_halves(p):
        return (load_f16(p), load_f16(p + 32))

    @compiled
    def half_and_zero(p):
        scale = load_f16(p)
        return (scale, load_u8_as_f32(p + 32) * (splat_f32(f32(0.0)) - scale))

    @compiled
    def given(span, p):
        return span

    @compiled
    def one_half(span, p):
        return (load_f16(p), span[1])

    @compiled
    def both_halves(span, p):
        return (load_f16(p), load_f16(p + 32))

    @compiled
    def unsigned_bytes(span, p):
        return (load_u8_as_f32(p) * span[0], load_u8_as_f32(p + 16) * span[1])

    @compiled
    def signed_bytes(span, p):
        return (load_i8_as_f32(p) * span[0], load_i8_as_f32(p + 16) * span[0])

    @compiled
    def as_is(acc, p):
        return acc

    @compiled
    def times_row_scale(acc, p):
        return acc * load_f32(p)

    return {
        "block": (nothing, one_half, as_is),
        "block_minimum": (nothing, both_halves, as_is),
        "super_block_minimum": (two_halves, unsigned_bytes, as_is),
        "super_block_halves": (half, signed_bytes, as_is),
        "row": (nothing, given, times_row_scale),
        "span": (half_and_zero, given, as_is),
    }[fmt.scales]


LOAD_VALUES = {"float32": load_f32, "float16": load_f16, "bfloat16": load_bf16}
