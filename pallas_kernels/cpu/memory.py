"""Addresses in numba code: structs in place, temporary space, constant text, calls into C.

Everything here is compiled, so it may touch neither Python objects nor numba's allocator: code that runs on XLA's
threads holds no GIL.
"""

from typing import Any

import numba
import numba.extending
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.np.numpy_support import carray

I64 = ir.IntType(64)

# What all code for kernels is declared with: LLVM code for one operation, and compiled Python. numba types neither.
intrinsic: Any = numba.extending.intrinsic
_njit: Any = numba.njit
compiled = _njit(nogil=True, error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True)


@intrinsic
def _pointer(context, address):
    return types.voidptr(types.int64), lambda c, b, s, a: b.inttoptr(a[0], cgutils.voidptr_t)


@intrinsic(prefer_literal=True)
def stack(context, size):
    """Address of `size` (a literal) bytes in the calling function's stack frame."""

    def lower(c, b, sig, args):
        area = cgutils.alloca_once(b, ir.ArrayType(cgutils.int8_t, size.literal_value))
        area.align = 16
        return b.ptrtoint(area, cgutils.intp_t)

    return (types.int64(size), lower) if isinstance(size, types.IntegerLiteral) else None


@intrinsic(prefer_literal=True)
def scratch(context, size):
    """As `stack`, but holding anything at first: zeros, one store for each byte, would take LLVM minutes for 32 KB."""

    def lower(c, b, sig, args):
        with b.goto_entry_block():
            area = b.alloca(ir.ArrayType(cgutils.int8_t, size.literal_value))
        area.align = 64
        return b.ptrtoint(area, cgutils.intp_t)

    return (types.int64(size), lower) if isinstance(size, types.IntegerLiteral) else None


@intrinsic(prefer_literal=True)
def text(context, literal):
    """Address of a constant string, ended by a zero byte."""

    def lower(c, b, sig, args):
        return b.ptrtoint(c.insert_const_string(b.module, literal.literal_value), I64)

    return (types.int64(literal), lower) if isinstance(literal, types.StringLiteral) else None


def at(dtype: Any) -> Any:
    """A compiled function: address -> the value there; a struct's fields are its attributes."""
    return compiled(lambda address: carray(_pointer(address), 1, dtype)[0])


def c_function(name: str, *, num_params: int, returns: bool) -> Any:
    """A compiled function that calls libc's `name`; parameters and result are int64."""

    def lower(c, b, sig, args):
        fn_type = ir.FunctionType(I64 if returns else ir.VoidType(), [I64] * num_params)
        value = b.call(cgutils.get_or_insert_function(b.module, fn_type, name), args)
        return value if returns else c.get_dummy_value()

    signature = (types.int64 if returns else types.void)(*[types.int64] * num_params)
    if num_params == 1:
        return intrinsic(lambda context, x: (signature, lower))
    assert num_params == 0
    return intrinsic(lambda context: (signature, lower))


def c_entry(context: Any, module: ir.Module, overload: Any, name: str, linkage: str = "linkonce_odr") -> ir.Function:
    """`int64_t name(int64_t)` in `module` around a compiled overload `f(int64) -> int64`."""
    if name in module.globals:
        return module.globals[name]
    callee = context.declare_function(module, overload.fndesc)
    entry = ir.Function(module, ir.FunctionType(I64, [I64]), name)
    entry.linkage = linkage
    builder = ir.IRBuilder(entry.append_basic_block())
    signature = overload.signature
    status, result = context.call_conv.call_function(builder, callee, signature.return_type, signature.args, entry.args)
    with builder.if_then(status.is_error, likely=False):
        # A call that optimization removes unless the code can raise; compiler.py refuses what is left.
        fn_type = ir.FunctionType(ir.VoidType(), [])
        builder.call(cgutils.get_or_insert_function(module, fn_type, "raise_exception"), [])
    builder.ret(result)
    return entry
