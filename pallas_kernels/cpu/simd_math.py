"""More SIMD operations, as simd.py declares them: what attention needs beyond dot products.

Number conversions (bfloat16, int8), masks by lane, horizontal sums and maxima, prefetch, exp and tanh.
"""

from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba import types
from numba.core import cgutils

from pallas_kernels.cpu.memory import compiled, intrinsic
from pallas_kernels.cpu.simd import (
    F32,
    I8,
    I16,
    I32,
    I64,
    _call,
    _fill,
    _load,
    _op,
    _reduce,
    _shuffle,
    _splat,
    _store,
    _vec,
    f32,
    f32x16,
    fma,
    i32x16,
    i64,
    round_even,
    splat_f32,
    target_has,
    to_i32,
)

_F, _I, _H = _vec(F32, 16), _vec(I32, 16), _vec(I16, 16)
_LOG2_E = f32(1.44269504)
# ln 2 in two parts, so that n * _LN2_HIGH is exact (Cephes, expf).
_LN2_HIGH, _LN2_LOW = f32(0.693359375), f32(-2.12194440e-4)


@_op(i64, i64)
def load_i32s(b, addr):
    """One int32, widened; a trailing s names the scalar forms."""
    return b.sext(_load(b, addr, I32), I64)


@_op(f32, i64)
def load_f32s(b, addr):
    return _load(b, addr, F32)


@_op(types.void, i64, i64)
def copy_4_bytes(b, target, source):
    _store(b, target, _load(b, source, I32))


@_op(types.void, i64, i64)
def copy_2_bytes(b, target, source):
    _store(b, target, _load(b, source, I16))


@_op(types.void, i64, i64)
def copy_1_byte(b, target, source):
    _store(b, target, _load(b, source, I8))


@_op(types.void, i64)
def prefetch(b, addr):
    """Asks for the cache line at addr, into the second-level cache; harmless for any address."""
    pointer = b.inttoptr(addr, I8.as_pointer())
    hints = [ir.Constant(I32, n) for n in (0, 2, 1)]  # read, second level, data
    fn_type = ir.FunctionType(ir.VoidType(), [pointer.type, I32, I32, I32])
    b.call(
        cgutils.get_or_insert_function(b.module, fn_type, "llvm.prefetch.p0"),
        [pointer, *hints],
    )


@intrinsic(prefer_literal=True)
def zeros(context, size):
    """Address of `size` (a literal) constant zero bytes."""

    def lower(c, b, sig, args):
        area = ir.ArrayType(I8, size.literal_value)
        constant: Any = cgutils.global_constant(b, f"zeros.{size.literal_value}", ir.Constant(area, None))
        constant.align = 64
        return b.ptrtoint(constant, I64)

    return (types.int64(size), lower) if isinstance(size, types.IntegerLiteral) else None


@_op(f32x16, i64)
def load_bf16(b, addr):
    """Sixteen bfloat16, widened to f32."""
    return b.bitcast(b.shl(b.zext(_load(b, addr, _H), _I), _fill(_I, 16)), _F)


@_op(types.void, i64, f32x16)
def store_bf16(b, addr, v):
    """Rounds to the nearest bfloat16, ties to even; NaN stays NaN."""
    bits = b.bitcast(v, _I)
    odd = b.and_(b.lshr(bits, _fill(_I, 16)), _fill(_I, 1))
    rounded = b.add(bits, b.add(odd, _fill(_I, 0x7FFF)))
    quiet = b.or_(bits, _fill(_I, 0x400000))
    bits = b.select(b.fcmp_unordered("uno", v, v), quiet, rounded)
    _store(b, addr, b.trunc(b.lshr(bits, _fill(_I, 16)), _H))


@_op(f32x16, i64)
def load_i8_as_f32(b, addr):
    return b.sitofp(b.sext(_load(b, addr, _vec(I8, 16)), _I), _F)


@_op(f32x16, f32x16, f32x16)
def divide(b, x, y):
    return b.fdiv(x, y)


@_op(f32, f32)
def square_root(b, x):
    return _call(b, "llvm.sqrt.f32", F32, x)


@_op(f32x16, f32x16, f32x16)
def larger(b, x, y):
    """The larger of each lane; y where x is no number."""
    return b.select(b.fcmp_ordered(">", x, y), x, y)


@_op(f32x16, f32x16, f32x16, f32x16, f32x16)
def where_less(b, x, y, then, otherwise):
    """then where x < y, otherwise elsewhere."""
    return b.select(b.fcmp_ordered("<", x, y), then, otherwise)


@_op(f32x16, f32x16)
def absolute(b, x):
    return _call(b, "llvm.fabs.v16f32", _F, x)


@_op(f32x16, f32x16, i64, i64, f32)
def keep_between(b, v, low, high, other):
    """Lanes low <= i < high from v, the rest set to `other`."""
    lanes = ir.Constant(_I, list(range(16)))
    above = b.icmp_signed(">=", lanes, _splat(b, b.trunc(low, I32), 16))
    below = b.icmp_signed("<", lanes, _splat(b, b.trunc(high, I32), 16))
    return b.select(b.and_(above, below), v, _splat(b, other, 16))


@_op(f32, f32x16)
def hsum(b, v):
    """The sum of all lanes, in a fixed order."""
    return _reduce(b, v, b.fadd)


@_op(f32, f32x16)
def hmax(b, v):
    """The largest lane; lanes that are no number do not count."""
    return _reduce(b, v, lambda x, y: b.select(b.fcmp_ordered(">", x, y), x, y))


@_op(f32, f32x16)
def first_lane(b, v):
    return b.extract_element(v, ir.Constant(I32, 0))


@_op(f32x16, f32x16, f32x16)
def zip_low(b, x, y):
    """[x0, y0, x1, y1, ..., x7, y7]."""
    return _shuffle(b, x, y, [lane + 16 * part for lane in range(8) for part in range(2)])


@_op(f32x16, f32x16, f32x16)
def zip_high(b, x, y):
    """[x8, y8, ..., x15, y15]."""
    return _shuffle(b, x, y, [lane + 16 * part for lane in range(8, 16) for part in range(2)])


def _tile_of(rows: Any, vectors: Any) -> Any:
    """The type of a tile of registers, row after row; None unless both sizes are literals."""
    if not isinstance(rows, types.IntegerLiteral) or not isinstance(vectors, types.IntegerLiteral):
        return None
    return types.UniTuple(f32x16, rows.literal_value * vectors.literal_value)


def _places(b: Any, address: Any, row_bytes: Any, rows: Any, vectors: Any) -> list[Any]:
    """Addresses of a tile's vectors in memory, rows `row_bytes` apart."""
    starts = [b.add(address, b.mul(row_bytes, ir.Constant(I64, r))) for r in range(rows.literal_value)]
    return [b.add(start, ir.Constant(I64, 64 * n)) for start in starts for n in range(vectors.literal_value)]


# Tiles are read, added to and written by one operation each: numba's own tuple indexing would be unrolled by LLVM,
# which takes minutes for tiles of sixteen.


@intrinsic(prefer_literal=True)
def load_tile(context, address, row_bytes, rows, vectors):
    """A tile of `rows` times `vectors` vectors (literals), rows `row_bytes` apart."""
    tile = _tile_of(rows, vectors)

    def lower(c, b, sig, args):
        places = _places(b, args[0], args[1], rows, vectors)
        return c.make_tuple(b, tile, [_load(b, place, _F) for place in places])

    return tile and (tile(types.int64, types.int64, rows, vectors), lower)


@intrinsic(prefer_literal=True)
def store_tile(context, address, row_bytes, rows, vectors, tile):
    """Writes a tile as `load_tile` reads it."""
    if _tile_of(rows, vectors) is None:
        return None

    def lower(c, b, sig, args):
        for i, place in enumerate(_places(b, args[0], args[1], rows, vectors)):
            _store(b, place, b.extract_value(args[4], i))
        return c.get_dummy_value()

    return types.void(types.int64, types.int64, rows, vectors, tile), lower


@intrinsic
def add_products(context, tile, columns, factors, stride):
    """tile[r][n] + columns[n] * factor r, for float32 factors in memory, `stride` bytes apart, by fma."""
    num_vectors = len(columns)

    def lower(c, b, sig, args):
        values, column, address, step = args
        sums = []
        for r in range(len(tile) // num_vectors):
            factor = _load(b, b.add(address, b.mul(step, ir.Constant(I64, r))), F32)
            factor = _splat(b, factor, 16)
            for n in range(num_vectors):
                old = b.extract_value(values, r * num_vectors + n)
                sums.append(_fma(b, b.extract_value(column, n), factor, old))
        return c.make_tuple(b, tile, sums)

    return tile(tile, columns, types.int64, types.int64), lower


def _fma(b: Any, x: Any, y: Any, z: Any) -> Any:
    """As simd.fma, for operations that emit several."""
    if target_has("fma") or not llvm.get_process_triple().startswith("x86"):
        return _call(b, "llvm.fma.v16f32", _F, x, y, z)
    return b.fadd(b.fmul(x, y), z)


@_op(f32x16, i32x16)
def _power_of_two(b, n):
    return b.bitcast(b.shl(b.add(n, _fill(_I, 127)), _fill(_I, 23)), _F)


@compiled
def exp(x):
    """e**x for x <= 88, relative error below 2e-7; values under -87 give about 1e-38, NaN gives NaN.

    The polynomial is that of Cephes' expf.
    """
    lowest = splat_f32(f32(-87.0))
    x = where_less(x, lowest, lowest, x)
    n = round_even(x * splat_f32(_LOG2_E))
    r = fma(n, splat_f32(-_LN2_HIGH), x)
    r = fma(n, splat_f32(-_LN2_LOW), r)
    p = splat_f32(f32(1.9875691500e-4))
    p = fma(p, r, splat_f32(f32(1.3981999507e-3)))
    p = fma(p, r, splat_f32(f32(8.3334519073e-3)))
    p = fma(p, r, splat_f32(f32(4.1665795894e-2)))
    p = fma(p, r, splat_f32(f32(1.6666665459e-1)))
    p = fma(p, r, splat_f32(f32(5.0000001201e-1)))
    p = fma(p, r * r, r + splat_f32(f32(1.0)))
    return p * _power_of_two(to_i32(n))


@compiled
def tanh(x):
    """Relative error below 1e-6: a polynomial near zero (Cephes, tanhf), elsewhere 1 - 2 / (e**2|x| + 1)."""
    size, one, two = absolute(x), splat_f32(f32(1.0)), splat_f32(f32(2.0))
    z = x * x
    p = splat_f32(f32(-5.70498872745e-3))
    p = fma(p, z, splat_f32(f32(2.06390887954e-2)))
    p = fma(p, z, splat_f32(f32(-5.37397155531e-2)))
    p = fma(p, z, splat_f32(f32(1.33314422036e-1)))
    p = fma(p, z, splat_f32(f32(-3.33332819422e-1)))
    near = fma(p, z * x, x)
    small = exp(size * splat_f32(f32(-2.0)))  # e**-2|x|: never overflows
    far = one - divide(two * small, one + small)
    far = where_less(x, splat_f32(f32(0.0)), splat_f32(f32(0.0)) - far, far)
    return where_less(size, splat_f32(f32(0.625)), near, far)
