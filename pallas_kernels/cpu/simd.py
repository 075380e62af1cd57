"""SIMD vectors as ordinary numba values.

A kernel is plain Python compiled by numba; vectors are immutable values held in local variables, tuples and function
arguments, and addresses are int64:

    acc = splat_f32(0.0)
    for i in range(0, n, 16):
        acc = fma(load_f32(x + 4 * i), load_f32(y + 4 * i), acc)
    store_f32(out, acc)

Every operation lowers to generic LLVM IR that any target can compile; `dot_u8i8`, `load_f16` and `fma` use a dedicated
instruction when the compilation target has one. Loads and stores need no alignment.
"""

import inspect
import operator
from collections.abc import Callable
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba import types
from numba.core import cgutils, config
from numba.core.datamodel import models
from numba.extending import overload, register_model

from pallas_kernels.cpu.memory import intrinsic

I1, I8, I16, I32, I64 = (ir.IntType(n) for n in (1, 8, 16, 32, 64))
F16, F32 = ir.HalfType(), ir.FloatType()
_ELEMENTS = {"f32": F32, "i32": I32, "i8": I8, "u8": I8}


class Vec(types.Type):
    """numba's type of a vector: `lanes` elements of kind f32, i32, i8 or u8."""

    def __init__(self, elem: str, lanes: int):
        self.elem, self.lanes = elem, lanes
        super().__init__(name=f"{elem}x{lanes}")


@register_model(Vec)
class _VecModel(models.PrimitiveModel):
    def __init__(self, dmm, vec):
        super().__init__(dmm, vec, _vec(_ELEMENTS[vec.elem], vec.lanes))


def target_has(feature: str) -> bool:
    """Whether the code is compiled for a CPU with `feature` (see compiler.compile_for)."""
    return f"+{feature}" in config.CPU_FEATURES.split(",")  # type: ignore[attr-defined]


def _vec(elem: ir.Type, lanes: int) -> ir.VectorType:
    return ir.VectorType(elem, lanes)


def _op(result: Any, *params: Any) -> Callable[[Callable[..., Any]], Any]:
    """Decorator: turns emit(builder, *values) into a numba intrinsic."""

    def wrap(emit):
        def lower(context, builder, sig, args):
            value = emit(builder, *args)
            return context.get_dummy_value() if value is None else value

        def typer(context, *args):
            return (result(*params), lower) if args == params else None

        names = ["context", *(f"a{i}" for i in range(len(params)))]
        kind = inspect.Parameter.POSITIONAL_ONLY
        typer.__signature__ = inspect.Signature(inspect.Parameter(n, kind) for n in names)  # type: ignore[attr-defined]
        typer.__name__, typer.__doc__ = emit.__name__, emit.__doc__
        return intrinsic(typer)

    return wrap


def _call(b, name, result, *args):
    fn_type = ir.FunctionType(result, [a.type for a in args])
    return b.call(cgutils.get_or_insert_function(b.module, fn_type, name), args)


def _fill(vec, x):
    return ir.Constant(vec, [x] * vec.count)


def _load(b, addr, type_, align=1):
    value = b.load(b.inttoptr(addr, type_.as_pointer()))
    value.align = align
    return value


def _store(b, addr, value, align=1):
    b.store(value, b.inttoptr(addr, value.type.as_pointer())).align = align


def _shuffle(b, x, y, lanes):
    return b.shuffle_vector(x, y, ir.Constant(_vec(I32, len(lanes)), list(lanes)))


def _splat(b, x, lanes):
    one = b.insert_element(ir.Constant(_vec(x.type, lanes), ir.Undefined), x, ir.Constant(I32, 0))
    return _shuffle(b, one, one, [0] * lanes)


def _reduce(b, v, combine):
    lanes = v.type.count
    while lanes > 1:
        lanes //= 2
        low, high = (_shuffle(b, v, v, range(i, i + lanes)) for i in (0, lanes))
        v = combine(low, high)
    return b.extract_element(v, ir.Constant(I32, 0))


i64, i32, f32 = types.int64, types.int32, types.float32
f32x16, i32x16 = Vec("f32", 16), Vec("i32", 16)
u8x64, i8x64 = Vec("u8", 64), Vec("i8", 64)
_F, _I, _B, _H = _vec(F32, 16), _vec(I32, 16), _vec(I8, 64), _vec(I16, 16)


@_op(i64, i64)
def load_i64s(b, addr):
    """One int64; a trailing s names the scalar forms."""
    return _load(b, addr, I64)


@_op(types.void, i64, i64)
def store_i64s(b, addr, x):
    _store(b, addr, x)


@_op(types.void, i64, f32)
def store_f32s(b, addr, x):
    _store(b, addr, x)


@_op(types.void, i64, i32)
def store_i32s(b, addr, x):
    _store(b, addr, x)


@_op(f32x16, i64)
def load_f32(b, addr):
    return _load(b, addr, _F)


@_op(u8x64, i64)
def load_u8(b, addr):
    return _load(b, addr, _B)


@_op(f32x16, i64)
def load_f16(b, addr):
    """Sixteen IEEE halves, widened to f32."""
    if target_has("f16c"):
        return b.fpext(_load(b, addr, _vec(F16, 16)), _F)
    # Without the instruction: move sign and payload, rescale the exponent by 2^112. Subnormal halves are converted as
    # integers: moved, they would be subnormal floats, which XLA's threads take for zero.
    h = b.zext(_load(b, addr, _H), _I)
    sign = b.shl(b.and_(h, _fill(_I, 0x8000)), _fill(_I, 16))
    magnitude = b.shl(b.and_(h, _fill(_I, 0x7FFF)), _fill(_I, 13))
    finite = b.bitcast(b.fmul(b.bitcast(magnitude, _F), _fill(_F, 2.0**112)), _I)
    payload = b.and_(h, _fill(_I, 0x7FFF))
    is_subnormal = b.icmp_unsigned("<", payload, _fill(_I, 0x0400))
    subnormal = b.bitcast(b.fmul(b.sitofp(payload, _F), _fill(_F, 2.0**-24)), _I)
    finite = b.select(is_subnormal, subnormal, finite)
    special = b.or_(magnitude, _fill(_I, 0x7F800000))
    is_special = b.icmp_unsigned(">=", magnitude, _fill(_I, 0x7C00 << 13))
    return b.bitcast(b.or_(b.select(is_special, special, finite), sign), _F)


def _first_lanes(b, count):
    lanes = ir.Constant(_vec(I64, 16), list(range(16)))
    return b.icmp_signed("<", lanes, _splat(b, count, 16))


@_op(f32x16, i64, i64)
def load_first_f32(b, addr, count):
    """The first `count` lanes, zero in the others, whose memory is not touched."""
    pointer = b.inttoptr(addr, _F.as_pointer())
    return _call(
        b, "llvm.masked.load.v16f32.p0", _F, pointer, ir.Constant(I32, 4), _first_lanes(b, count), _fill(_F, 0.0)
    )


@_op(f32x16, i64)
def load_u8_as_f32(b, addr):
    """Sixteen unsigned bytes."""
    return b.uitofp(b.zext(_load(b, addr, _vec(I8, 16)), _I), _F)


@_op(f32x16, i64)
def load_i8_as_f32(b, addr):
    """Sixteen signed bytes."""
    return b.sitofp(b.sext(_load(b, addr, _vec(I8, 16)), _I), _F)


@_op(f32x16, i64)
def load_bf16(b, addr):
    """Sixteen bfloat16, widened to f32."""
    return b.bitcast(b.shl(b.zext(_load(b, addr, _H), _I), _fill(_I, 16)), _F)


@_op(types.void, i64, f32x16)
def store_f32(b, addr, v):
    _store(b, addr, v)


@_op(types.void, i64, f32x16, i64)
def store_first_f32(b, addr, v, count):
    """The first `count` lanes."""
    pointer = b.inttoptr(addr, _F.as_pointer())
    fn_type = ir.FunctionType(ir.VoidType(), [_F, pointer.type, I32, _vec(I1, 16)])
    function = cgutils.get_or_insert_function(b.module, fn_type, "llvm.masked.store.v16f32.p0")
    b.call(function, [v, pointer, ir.Constant(I32, 4), _first_lanes(b, count)])


@_op(types.void, i64, i32x16)
def store_i32_as_i8(b, addr, v):
    _store(b, addr, b.trunc(v, _vec(I8, 16)))


@_op(f32x16, f32)
def splat_f32(b, x):
    return _splat(b, x, 16)


@_op(i32x16, i32)
def splat_i32(b, x):
    return _splat(b, x, 16)


@_op(f32x16, i64)
def splat_load_f32(b, addr):
    return _splat(b, _load(b, addr, F32), 16)


@_op(i32x16, i64)
def splat_load_i32(b, addr):
    return _splat(b, _load(b, addr, I32), 16)


@_op(i8x64, i64)
def splat_load_i8x4(b, addr):
    """Four consecutive bytes, repeated sixteen times."""
    return b.bitcast(_splat(b, _load(b, addr, I32), 16), _B)


@_op(f32x16, f32x16, f32x16, f32x16)
def fma(b, x, y, z):
    """x * y + z, rounded once where the target has the instruction; elsewhere LLVM would call libm for each lane."""
    if target_has("fma") or not llvm.get_process_triple().startswith("x86"):
        return _call(b, "llvm.fma.v16f32", _F, x, y, z)
    return b.fadd(b.fmul(x, y), z)


@_op(f32, f32x16, f32x16)
def largest_magnitude(b, x, y):
    """The largest absolute value in two vectors; NaN when one holds a NaN.

    As integers: without their sign bit, floats are ordered like their bits, with infinity and then NaN on top.
    """
    x, y = (b.and_(b.bitcast(v, _I), _fill(_I, 0x7FFFFFFF)) for v in (x, y))

    def larger(x, y):
        return b.select(b.icmp_unsigned(">", x, y), x, y)

    return b.bitcast(_reduce(b, larger(x, y), larger), F32)


@_op(f32x16, f32x16)
def round_even(b, x):
    return _call(b, "llvm.rint.v16f32", _F, x)


@_op(f32x16, i32x16)
def to_f32(b, x):
    return b.sitofp(x, _F)


@_op(i32x16, f32x16)
def to_i32(b, x):
    """Truncates toward zero; any value for what does not fit."""
    return b.fptosi(x, _I)


@_op(f32x16, f32x16, f32x16)
def least_f32(b, x, y):
    """The smaller of each lane; x where y is NaN, NaN where x is."""
    return b.select(b.fcmp_ordered(">", x, y), y, x)


@_op(i32x16, f32x16)
def f32_bits(b, x):
    return b.bitcast(x, _I)


@_op(f32x16, i32x16)
def f32_of_bits(b, x):
    return b.bitcast(x, _F)


@_op(i32x16, i32x16)
def shift_left_23(b, x):
    """To where a float32 has its exponent."""
    return b.shl(x, _fill(_I, 23))


@_op(f32, f32)
def square_root(b, x):
    return _call(b, "llvm.sqrt.f32", F32, x)


@_op(f32, f32x16)
def hsum_f32(b, v):
    """The sum of all lanes, pairwise."""
    return _reduce(b, v, b.fadd)


@_op(i32, i32x16)
def hsum_i32(b, v):
    """The sum of all lanes."""
    return _reduce(b, v, b.add)


@_op(i32x16, i32x16, u8x64, i8x64)
def dot_u8i8(b, acc, u, s):
    """acc[i] + sum of u[4i+j] * s[4i+j] over j < 4, exact in 32 bits."""
    return _dot_u8i8(b, acc, u, s)


def _dot_u8i8(b, acc, u, s):
    if target_has("avx512vnni"):
        # LLVM 22 types the byte operands <64 x i8>; older releases used <16 x i32>.
        u, s = (u, s) if llvm.llvm_version_info[0] >= 22 else (b.bitcast(u, _I), b.bitcast(s, _I))
        return _call(b, "llvm.x86.avx512.vpdpbusd.512", _I, acc, u, s)
    # Even and odd bytes as 16-bit lanes, then the pattern of the multiply-add-pairs instruction.
    wide, eight = _vec(I16, 32), _fill(_vec(I16, 32), 8)
    u, s = b.bitcast(u, wide), b.bitcast(s, wide)
    for x, y in (
        (b.and_(u, _fill(wide, 255)), b.ashr(b.shl(s, eight), eight)),
        (b.lshr(u, eight), b.ashr(s, eight)),
    ):
        product = b.mul(b.sext(x, _vec(I32, 32)), b.sext(y, _vec(I32, 32)))
        even = _shuffle(b, product, product, range(0, 32, 2))
        odd = _shuffle(b, product, product, range(1, 32, 2))
        acc = b.add(acc, b.add(even, odd))
    return acc


def _halves(b, v):
    """A vector of 64 bytes as two."""
    return [_shuffle(b, v, v, range(i, i + 32)) for i in (0, 32)]


def _add_pairs(b, acc, u, s):
    """acc[i] + sum of u[4i+j] * s[4i+j], by instructions that add two products of bytes in 16 bits, saturating."""
    i16x16, i32x8, i16x32 = _vec(I16, 16), _vec(I32, 8), _vec(I16, 32)
    if target_has("avx512bw"):
        pairs = _call(b, "llvm.x86.avx512.pmaddubs.w.512", i16x32, u, s)
        return b.add(acc, _call(b, "llvm.x86.avx512.pmaddw.d.512", _I, pairs, _fill(i16x32, 1)))
    sums = []
    for u_half, s_half in zip(_halves(b, u), _halves(b, s), strict=True):
        pairs = _call(b, "llvm.x86.avx2.pmadd.ub.sw", i16x16, u_half, s_half)
        sums.append(_call(b, "llvm.x86.avx2.pmadd.wd", i32x8, pairs, _fill(i16x16, 1)))
    return b.add(acc, _shuffle(b, sums[0], sums[1], range(16)))


def has_dot_u8i8() -> bool:
    """Whether `dot_u8i8` is one instruction, or no worse than others: then `dot_small_u8i8` is the same."""
    return target_has("avx512vnni") or not target_has("avx2")


@_op(i32x16, i32x16, u8x64, i8x64)
def dot_small_u8i8(b, acc, u, s):
    """As `dot_u8i8` for u of at most 6 bits and s of at least -127."""
    return _dot_u8i8(b, acc, u, s) if has_dot_u8i8() else _add_pairs(b, acc, u, s)


@_op(i32x16, i32x16, u8x64, i8x64)
def dot_above_128(b, acc, u, s):
    """acc[i] + sum of (u[4i+j] - 128) * s[4i+j], for s of at least -127; where `has_dot_u8i8` is false."""
    value = b.xor(u, _fill(_B, 128))
    is_negative = b.icmp_signed("<", value, _fill(_B, 0))
    magnitude = b.select(is_negative, b.neg(value), value)
    if target_has("avx512bw"):
        return _add_pairs(b, acc, magnitude, b.select(is_negative, b.neg(s), s))
    pairs = zip(_halves(b, s), _halves(b, value), strict=True)
    signed = [_call(b, "llvm.x86.avx2.psign.b", _vec(I8, 32), x, y) for x, y in pairs]
    return _add_pairs(b, acc, magnitude, _shuffle(b, signed[0], signed[1], range(64)))


@_op(u8x64, u8x64)
def low_nibbles(b, v):
    return b.and_(v, _fill(_B, 15))


@_op(u8x64, u8x64)
def high_nibbles(b, v):
    return b.lshr(v, _fill(_B, 4))


def bit_to_16(bit: int) -> Any:
    """An operation: 16 in each byte whose bit `bit` is set, else 0."""

    @_op(u8x64, u8x64)
    def move(b, v):
        v = b.shl(v, _fill(_B, 4 - bit)) if bit <= 4 else b.lshr(v, _fill(_B, bit - 4))
        return b.and_(v, _fill(_B, 16))

    return move


def bits_to_16(pair: int) -> Any:
    """An operation: bits 2 * pair and the next one of each byte, moved to where 16 and 32 are."""

    @_op(u8x64, u8x64)
    def move(b, v):
        v = b.shl(v, _fill(_B, 4 - 2 * pair)) if pair <= 2 else b.lshr(v, _fill(_B, 2 * pair - 4))
        return b.and_(v, _fill(_B, 48))

    return move


@intrinsic(prefer_literal=True)
def repeat(context, v, n):
    """A tuple of n (a literal) copies of v: a tile of registers."""
    if not isinstance(n, types.IntegerLiteral):
        return None
    tile = types.UniTuple(v, n.literal_value)

    def lower(c, b, sig, args):
        return c.make_tuple(b, tile, [args[0]] * n.literal_value)

    return tile(v, n), lower


@intrinsic
def replace(context, tile, i, v):
    """The tile with element i replaced; loops over constant ranges unroll."""

    def lower(c, b, sig, args):
        array, index, value = args
        slot = cgutils.alloca_once_value(b, array)
        b.store(value, b.gep(slot, [ir.Constant(I32, 0), index], inbounds=True))
        return b.load(slot)

    return tile(tile, types.int64, v), lower


def _add_operator(op, vec, emit):
    @_op(vec, vec, vec)
    def apply(b, x, y):
        return emit(b)(x, y)

    @overload(op, inline="always")
    def _overloaded(x, y):
        if x == vec and y == vec:
            return lambda x, y: apply(x, y)


for _vec_type, _prefix in ((f32x16, "f"), (i32x16, "")):
    for _name in ("add", "sub", "mul"):
        _add_operator(getattr(operator, _name), _vec_type, operator.attrgetter(_prefix + _name))
_add_operator(operator.truediv, f32x16, operator.attrgetter("fdiv"))


@_op(u8x64, u8x64, u8x64)
def or_u8(b, x, y):
    return b.or_(x, y)
