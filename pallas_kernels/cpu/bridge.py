"""XLA FFI targets written in numba.

`declare` turns a compiled function `body(call) -> error` into one that answers XLA's metadata query, ignores every
stage but execute, and checks the ABI and all operands before the body runs. `call` is the address of the
XLA_FFI_CallFrame; the body reads it with `arg`, `ret`, `dim` and `attr_*`, and returns OK or `fail(...)`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils

from pallas_kernels.cpu import abi
from pallas_kernels.cpu.memory import at, compiled, intrinsic, stack, text

OK = 0
_FRAME_SIZE, _API_SIZE = abi.size_in_c(abi.CALL_FRAME), abi.size_in_c(abi.API)
_BUFFER_SIZE, _ERROR_SIZE = abi.size_in_c(abi.BUFFER_STRUCT), abi.size_in_c(abi.ERROR_CREATE_ARGS)
_MESSAGE_BYTES = 256

i64 = types.int64
frame_at, api_at = at(abi.CALL_FRAME), at(abi.API)
_buffer_at, _scalar_at, _span_at = at(abi.BUFFER_STRUCT), at(abi.SCALAR_STRUCT), at(abi.BYTE_SPAN)
_extension_at, _metadata_at = at(abi.METADATA_EXTENSION), at(abi.METADATA)
_error_at = at(abi.ERROR_CREATE_ARGS)
_word_at, _enum_at, _byte_at, _float_at = map(at, (np.int64, np.int32, np.uint8, np.float32))


@intrinsic
def call_at(context, function, args):
    """Calls the C function `int64_t function(int64_t)` at an address; an XLA API function takes and returns one."""

    def lower(c, b, sig, args):
        fn_type = ir.FunctionType(cgutils.intp_t, [cgutils.intp_t])
        return b.call(b.inttoptr(args[0], fn_type.as_pointer()), [args[1]])

    return types.int64(types.int64, types.int64), lower


@intrinsic
def _format(context, out, size, template, x, y, z):
    """snprintf into `out`."""

    def lower(c, b, sig, args):
        fn_type = ir.FunctionType(cgutils.int32_t, [cgutils.intp_t] * 3, var_arg=True)
        b.call(cgutils.get_or_insert_function(b.module, fn_type, "snprintf"), args)
        return c.get_dummy_value()

    return types.void(*[types.int64] * 6), lower


@compiled
def fail(call, code, template, x, y, z):
    """An XLA_FFI_Error; `template` is `text(...)` with up to three %lld for the int64 x, y, z."""
    message, address = stack(256), stack(32)
    _format(message, _MESSAGE_BYTES, template, x, y, z)
    args = _error_at(address)
    args.struct_size, args.extension_start = _ERROR_SIZE, 0
    args.message, args.errc = message, code  # XLA copies the message
    return call_at(api_at(frame_at(call).api).Error_Create, address)


@compiled
def arg(call, i):
    """Argument i, a buffer with .data and .dtype; `declare` has checked that it is one."""
    return _buffer_at(_word_at(frame_at(call).args.args + 8 * i))


@compiled
def ret(call, i):
    """Result i, as `arg`."""
    return _buffer_at(_word_at(frame_at(call).rets.rets + 8 * i))


@compiled
def dim(buffer, i):
    """Size of a buffer's dimension i."""
    return _word_at(buffer.dims + 8 * i)


@compiled
def attr_i64(call, i):
    """The scalar attribute at index `i` of the names in sorted order."""
    return _word_at(_scalar_at(_word_at(frame_at(call).attrs.attrs + 8 * i)).value)


@compiled
def attr_f32(call, i):
    """As `attr_i64`."""
    return _float_at(_scalar_at(_word_at(frame_at(call).attrs.attrs + 8 * i)).value)


@compiled
def _check_buffer(call, kind, address, dtype, rank, i, templates):
    """One operand against its dtype and rank; `templates` are texts for a wrong kind, dtype and rank."""
    if kind != abi.BUFFER:
        return fail(call, abi.INVALID_ARGUMENT, templates[0], i, 0, 0)
    buffer = _buffer_at(address)
    if buffer.struct_size < _BUFFER_SIZE:
        return fail(call, abi.FAILED_PRECONDITION, templates[0], i, 0, 0)
    if buffer.dtype != dtype:
        return fail(call, abi.INVALID_ARGUMENT, templates[1], i, i64(buffer.dtype), dtype)
    if buffer.rank != rank:
        return fail(call, abi.INVALID_ARGUMENT, templates[2], i, buffer.rank, rank)
    return OK


def _buffer_check(name: str, operand: str, specs: Sequence[tuple[int, int]]) -> Any:
    """A compiled function that compares all buffers with `specs`, (dtype, rank) pairs."""
    table, count = np.array(specs, np.int64).reshape(-1, 2), len(specs)
    wrong_count = f"{name}: got %lld {operand}s, expected %lld"
    wrong_kind = f"{name}: {operand} %lld is not a buffer of this ABI"
    wrong_dtype = f"{name}: {operand} %lld has XLA dtype %lld, expected %lld"
    wrong_rank = f"{name}: {operand} %lld has rank %lld, expected %lld"

    @compiled
    def check(call, size, kinds, buffers):
        if size != count:
            return fail(call, abi.INVALID_ARGUMENT, text(wrong_count), size, count, 0)
        templates = (text(wrong_kind), text(wrong_dtype), text(wrong_rank))
        for i in range(count):
            kind, address = i64(_enum_at(kinds + 4 * i)), _word_at(buffers + 8 * i)
            error = _check_buffer(call, kind, address, table[i, 0], table[i, 1], i, templates)
            if error != OK:
                return error
        return OK

    return check


def _attr_check(name: str, attrs: Mapping[str, int]) -> Any:
    """A compiled function that checks that exactly the scalars `attrs`, {name: dtype}, are there."""
    names = sorted(attrs)
    letters = np.frombuffer("".join(names).encode() + b"\0", np.uint8)
    table = np.array([(len(n), attrs[n]) for n in names], np.int64).reshape(-1, 2)
    count = len(names)
    wrong_count = f"{name}: got %lld attributes, expected %lld ({', '.join(names)})"
    wrong_attr = f"{name}: attribute %lld is not one of {', '.join(names)} or has a wrong type"

    @compiled
    def check_count(call, attrs):
        if attrs.size != count:
            return fail(call, abi.INVALID_ARGUMENT, text(wrong_count), attrs.size, count, 0)
        return OK

    @compiled
    def check(call, attrs):
        if attrs.size != count:
            return check_count(call, attrs)
        start = 0
        for i in range(count):
            span = _span_at(_word_at(attrs.names + 8 * i))
            good = _enum_at(attrs.types + 4 * i) == abi.SCALAR and span.len == table[i, 0]
            good = good and _scalar_at(_word_at(attrs.attrs + 8 * i)).dtype == table[i, 1]
            for j in range(table[i, 0] if good else 0):
                good = good and _byte_at(span.ptr + j) == letters[start + j]
            if not good:
                return fail(call, abi.INVALID_ARGUMENT, text(wrong_attr), i, 0, 0)
            start += table[i, 0]
        return OK

    return check if names else check_count


def declare_shared(
    name: str,
    body: Any,
    *,
    args: Sequence[tuple[int, int]],
    rets: Sequence[tuple[int, int]],
    attrs: Mapping[str, int] | None = None,
) -> Any:
    """`f(call, settings) -> error` around `body(call, settings)`: code that targets with settings of their own share.

    `args` and `rets` list (dtype, rank), `attrs` maps the names of scalar attributes to dtypes.
    """
    check_args = _buffer_check(name, "argument", args)
    check_rets = _buffer_check(name, "result", rets)
    check_attrs = _attr_check(name, attrs or {})
    wrong_abi = f"{name}: XLA FFI API %lld.%lld has smaller structs than known (frame: %lld bytes)"

    @compiled
    def target(call, settings):
        frame = frame_at(call)
        api = api_at(frame.api)
        version = api.api_version
        if frame.extension_start != 0:
            extension = _extension_at(frame.extension_start)
            if extension.extension_base.type == abi.EXTENSION_METADATA:
                answer = _metadata_at(extension.metadata).api_version
                answer.major_version = abi.API_MAJOR
                answer.minor_version = min(abi.NEWEST_MINOR, version.minor_version)
                return OK
        if frame.stage != abi.STAGE_EXECUTE:
            return OK
        if frame.struct_size < _FRAME_SIZE or api.struct_size < _API_SIZE:
            major, minor = i64(version.major_version), i64(version.minor_version)
            return fail(call, abi.FAILED_PRECONDITION, text(wrong_abi), major, minor, frame.struct_size)
        args, rets = frame.args, frame.rets
        error = check_args(call, args.size, args.types, args.args)
        if error == OK:
            error = check_rets(call, rets.size, rets.types, rets.rets)
        if error == OK:
            error = check_attrs(call, frame.attrs)
        return error if error != OK else body(call, settings)

    return target


def declare(name: str, body: Any, **operands: Any) -> Any:
    """The target `f(call) -> error` around `body(call)`; operands as in `declare_shared`."""
    shared = declare_shared(name, compiled(lambda call, settings: body(call)), **operands)
    return compiled(lambda call: shared(call, OK))
