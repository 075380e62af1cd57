"""The machine code of tiled_matmul: one FFI target for each format (see tiles.py for the layout).

Imported by the compiling child only. A target takes x [T, X] float32, the tiles, the weight of a norm [I] or [0] and a
residual [T, O] or [0, 0], and fills the result [T, O] float32 and a workspace with the activations (rows.py). Its
attributes: `before`, a code of rows.py; `eps` of the norm; `span_blocks`, the blocks of a span or 0.
"""

from typing import Any

import numpy as np

from pallas_kernels.cpu import abi
from pallas_kernels.cpu.activations import load_up_to
from pallas_kernels.cpu.bridge import OK, arg, attr_f32, attr_i64, call_at, declare_shared, dim, fail, ret
from pallas_kernels.cpu.memory import compiled, stack, text
from pallas_kernels.cpu.parallel import c_address, parallel
from pallas_kernels.cpu.simd import (
    fma,
    i64,
    load_f32,
    load_i64s,
    repeat,
    replace,
    splat_f32,
    splat_load_f32,
    store_f32,
    store_first_f32,
    store_i64s,
)
from pallas_kernels.cpu.simd_math import prefetch
from pallas_kernels.quantized_matmul.formats_compiled import LOAD_VALUES, VECTORS, add_block_of, scales_of, zero_of
from pallas_kernels.quantized_matmul.rows import EXTRA_ROWS, GELU_TANH, JOB_BYTES, NO_BEFORE, RMS_NORM, record_bytes
from pallas_kernels.quantized_matmul.rows_compiled import (
    JOB,
    LARGEST_TILE,
    NOT_ROUNDED,
    SCALED_SUM,
    ZERO_TIMES_HALVES,
    ZERO_TIMES_SUM,
    job_at,
    rows_of_tile,
    write_row,
)
from pallas_kernels.quantized_matmul.tiles import BLOCK_LENGTH, GROUP_LENGTH, TILE_FORMATS, TileFormat

_ZERO = np.float32(0)
_PARALLEL_ACTIVATIONS = 8192  # from this many on, activations are quantized in parallel
_ROWS_PER_CHUNK = 128  # whose activations stay in the second-level cache while the groups pass by
# Weights are asked for so many bytes before they are multiplied: a group's quants and scales are two streams too short
# for the CPU to foresee. Rows of a chunk after the first tile find them in the cache.
_AHEAD = 8192
_ITEM_COST = 16000  # about a microsecond, in the cycles of `_plan`


@compiled
def _store_rows(address, sums, row, num_rows, column):
    """Writes the sums at `sums`, 16 for each row, into the result, plus the residual."""
    job = job_at(address)
    num_rows, count = min(num_rows, job.num_rows - row), job.num_outputs - column
    at = 4 * (row * job.num_outputs + column)
    for r in range(num_rows):
        value = load_f32(sums + 64 * r)
        if job.residual != 0:
            value = value + load_up_to(job.residual + at, count)
        if count >= GROUP_LENGTH:
            store_f32(job.out + at, value)
        else:
            store_first_f32(job.out + at, value, count)
        at += 4 * job.num_outputs


def _tiles_of(fmt: TileFormat) -> Any:
    """Of a number of rows: a compiled function, the products of so many rows with one group of 16 outputs.

    Each row's arithmetic is the same for any number of rows, so that a row's result does not depend on the others.
    """
    vectors, add_block = VECTORS[fmt.bits], add_block_of(fmt)
    read_span, read_scales, finish = scales_of(fmt)
    quant_bytes, scale_bytes, span_bytes = fmt.quant_bytes, fmt.scale_bytes, fmt.span_bytes
    row_bytes, block_bytes = record_bytes(fmt), fmt.quant_bytes + fmt.scale_bytes

    def tile_of(num_rows: int) -> Any:
        @compiled
        def tile(address, group, row, column):
            job = job_at(address)
            num_blocks, span_blocks = job.num_blocks, job.span_blocks
            record = job.records + row * num_blocks * row_bytes
            block_scales = group + num_blocks * quant_bytes
            acc = repeat(splat_f32(_ZERO), num_rows)
            ahead, step = group + _AHEAD, block_bytes if row % _ROWS_PER_CHUNK == 0 else 0
            k, span = 0, block_scales + num_blocks * scale_bytes - span_bytes
            while k < num_blocks:
                span += span_bytes
                shared, end = read_span(span), min(k + span_blocks, num_blocks)
                while k < end:
                    for line in range(0, block_bytes, 64):
                        prefetch(ahead + line)
                    ahead += step
                    weights = vectors(group + k * quant_bytes)
                    scales = read_scales(shared, block_scales + k * scale_bytes)
                    for r in range(num_rows):
                        acc = replace(acc, r, add_block(acc[r], weights, scales, record + r * row_bytes))
                    record += num_rows * row_bytes
                    k += 1
            sums = stack(512)
            for r in range(num_rows):
                store_f32(sums + 64 * r, finish(acc[r], span))
            _store_rows(address, sums, row, i64(num_rows), column)

        return tile

    return tile_of


def _float_tiles_of(fmt: TileFormat) -> Any:
    """As `_tiles_of`, for values that are not quantized."""
    load, value_bytes, row_bytes = LOAD_VALUES[fmt.dtype], fmt.bits // 8, record_bytes(fmt)
    vector_bytes = GROUP_LENGTH * value_bytes

    def tile_of(num_rows: int) -> Any:
        @compiled
        def tile(address, group, row, column):
            job = job_at(address)
            record = job.records + row * job.num_blocks * row_bytes
            even, odd = repeat(splat_f32(_ZERO), num_rows), repeat(splat_f32(_ZERO), num_rows)
            for _ in range(job.num_blocks):
                for x in range(record, record + 4 * BLOCK_LENGTH, 8):
                    first, second = load(group), load(group + vector_bytes)
                    for r in range(num_rows):
                        even = replace(even, r, fma(first, splat_load_f32(x + r * row_bytes), even[r]))
                        odd = replace(odd, r, fma(second, splat_load_f32(x + r * row_bytes + 4), odd[r]))
                    group += 2 * vector_bytes
                record += num_rows * row_bytes
            sums = stack(512)
            for r in range(num_rows):
                store_f32(sums + 64 * r, even[r] + odd[r])
            _store_rows(address, sums, row, i64(num_rows), column)

        return tile

    return tile_of


def _group_work(fmt: TileFormat) -> Any:
    """A compiled function of the address of a job's address and an item's number: that item's groups of outputs, with
    its chunk of rows."""
    tile_of = _tiles_of(fmt) if fmt.is_quantized else _float_tiles_of(fmt)
    tile1, tile4 = tile_of(1), tile_of(4)
    tile8 = tile_of(8) if LARGEST_TILE == 8 else tile4

    @compiled
    def work(pair):
        address, i = load_i64s(pair), load_i64s(pair + 8)
        job = job_at(address)
        item = i % job.items_per_chunk
        start = i // job.items_per_chunk * _ROWS_PER_CHUNK
        end, first = min(start + _ROWS_PER_CHUNK, job.num_rows), item * job.groups_per_item
        for g in range(first, min(first + job.groups_per_item, job.num_groups)):
            group, row, column = job.tiles + g * job.group_bytes, start, g * GROUP_LENGTH
            while row < end:
                size = rows_of_tile(job.num_rows - row)
                if size == 8:
                    tile8(address, group, row, column)
                elif size == 4:
                    tile4(address, group, row, column)
                else:
                    tile1(address, group, row, column)
                row += size
        return 0

    return work


@compiled
def multiply_item(address, i):
    """Item i by the code of the job's format."""
    pair = stack(16)
    store_i64s(pair, address)
    store_i64s(pair + 8, i)
    call_at(job_at(address).work, pair)


@compiled
def plan(job):
    """Cuts the work into items of a microsecond or more and returns how many there are."""
    cost = job.num_blocks * (30 + 12 * min(job.num_rows, _ROWS_PER_CHUNK))
    job.groups_per_item = max(1, min(_ITEM_COST // cost, job.num_groups // 4))
    job.items_per_chunk = (job.num_groups + job.groups_per_item - 1) // job.groups_per_item
    return (job.num_rows + _ROWS_PER_CHUNK - 1) // _ROWS_PER_CHUNK * job.items_per_chunk


@compiled
def _set_format(job, settings):
    job.work, job.quant_bytes, job.scale_bytes, job.span_bytes = settings[0], settings[1], settings[2], settings[3]
    job.record_bytes, job.format_span = settings[4], settings[5]
    job.sums, job.zero = settings[6], settings[7]


@compiled
def describe(call, job, settings, num_experts):
    """Fills the job with what the format and the call say, unchecked."""
    _set_format(job, settings)
    job.num_experts, job.first_row, job.first_item = num_experts, 0, 0
    x, residual, out = arg(call, 0), arg(call, 3), ret(call, 0)
    job.x, job.tiles, job.norm, job.out = x.data, arg(call, 1).data, arg(call, 2).data, out.data
    job.residual = residual.data if dim(residual, 1) != 0 else 0
    job.records = ret(call, 1).data
    job.before, job.eps = attr_i64(call, 0), attr_f32(call, 1)
    job.num_rows, job.row_stride, job.num_outputs = dim(x, 0), dim(x, 1), dim(out, 1)
    job.num_inputs = job.row_stride // 2 if job.before > RMS_NORM else job.row_stride
    job.num_blocks = (job.num_inputs + BLOCK_LENGTH - 1) // BLOCK_LENGTH
    job.num_groups = (job.num_outputs + GROUP_LENGTH - 1) // GROUP_LENGTH
    span_blocks = max(attr_i64(call, 2), job.format_span)
    job.span_blocks = span_blocks if span_blocks > 0 else max(job.num_blocks, 1)
    job.num_spans = (job.num_blocks + job.span_blocks - 1) // job.span_blocks
    job.group_bytes = job.num_blocks * (job.quant_bytes + job.scale_bytes) + job.num_spans * job.span_bytes


_WRONG_BEFORE = "tiled_matmul: attribute before is %lld, expected 0 to 3"
_WRONG_COLUMNS = "tiled_matmul: x has %lld columns, an odd number: no gate and up"
_WRONG_ROWS = "tiled_matmul: x has %lld rows, the result %lld"
_WRONG_NORM = "tiled_matmul: a norm's weight of %lld values, expected %lld"
_WRONG_RESIDUAL = "tiled_matmul: a residual of [%lld, %lld], not the result's shape"
_WRONG_TILES = "tiled_matmul: tiles of %lld bytes, expected %lld for this O and I"
_WRONG_WORKSPACE = "tiled_matmul: workspace of %lld bytes, expected %lld"


@compiled
def check(call, job):
    """Compares all sizes of a call."""
    zero = job.num_rows * 0  # an int64, as the others: so that `fail` is compiled once
    if job.before < NO_BEFORE or job.before > GELU_TANH:
        return fail(call, abi.INVALID_ARGUMENT, text(_WRONG_BEFORE), job.before, zero, zero)
    if job.before > RMS_NORM and job.row_stride % 2 != 0:
        return fail(call, abi.INVALID_ARGUMENT, text(_WRONG_COLUMNS), job.row_stride, zero, zero)
    out_rows = dim(ret(call, 0), 0)
    if out_rows != job.num_rows:
        return fail(call, abi.INVALID_ARGUMENT, text(_WRONG_ROWS), job.num_rows, out_rows, zero)
    size, expected = dim(arg(call, 2), 0), job.num_inputs if job.before == RMS_NORM else zero
    if size != expected:
        return fail(call, abi.INVALID_ARGUMENT, text(_WRONG_NORM), size, expected, zero)
    rows, columns = dim(arg(call, 3), 0), dim(arg(call, 3), 1)
    if (rows != 0 or columns != 0) and (rows != job.num_rows or columns != job.num_outputs):
        return fail(call, abi.INVALID_ARGUMENT, text(_WRONG_RESIDUAL), rows, columns, zero)
    size, expected = dim(arg(call, 1), 0), job.num_experts * job.num_groups * job.group_bytes
    if size != expected:
        return fail(call, abi.INVALID_ARGUMENT, text(_WRONG_TILES), size, expected, zero)
    num_records = (job.num_rows + EXTRA_ROWS * job.num_experts) * job.num_blocks
    size, expected = dim(ret(call, 1), 0), num_records * job.record_bytes
    if size != expected:
        return fail(call, abi.INVALID_ARGUMENT, text(_WRONG_WORKSPACE), size, expected, zero)
    return OK


_write_rows, _multiply = parallel(write_row), parallel(multiply_item)
assert JOB.itemsize == JOB_BYTES == 240, "stack() takes a literal"


@compiled
def _body(call, settings):
    address = stack(240)
    job = job_at(address)
    describe(call, job, settings, 1)
    error = check(call, job)
    if error != OK:
        return error
    if job.num_rows * job.num_inputs < _PARALLEL_ACTIVATIONS:
        for row in range(job.num_rows):
            write_row(address, row)
    else:
        _write_rows(call, address, job.num_rows)
    _multiply(call, address, plan(job))
    return OK


_tiled_matmul = declare_shared(
    "tiled_matmul",
    _body,
    args=[(abi.F32, 2), (abi.U8, 1), (abi.F32, 1), (abi.F32, 2)],
    rets=[(abi.F32, 2), (abi.U8, 1)],
    attrs={"before": abi.S64, "eps": abi.F32, "span_blocks": abi.S64},
)


def _sums_of(fmt: TileFormat) -> int:
    if not fmt.is_quantized:
        return NOT_ROUNDED
    if fmt.num_sums == 2:
        return ZERO_TIMES_HALVES
    return SCALED_SUM if fmt.has_minimum else ZERO_TIMES_SUM


def target_of(shared: Any, format_name: str) -> Any:
    """The FFI target of one format: the shared code, told about the format."""
    fmt = TILE_FORMATS[format_name]
    work_address = c_address(_group_work(fmt))
    sizes = (fmt.quant_bytes, fmt.scale_bytes, fmt.span_bytes, record_bytes(fmt))
    rounding = (fmt.span_blocks, _sums_of(fmt), zero_of(fmt))

    @compiled
    def target(call):
        return shared(call, (work_address(), *sizes, *rounding))

    return target


q4_0, q4_1, q5_0, q5_1, q8_0, q4_k, q5_k, q6_k, int8, int4, f32, f16, bf16 = (
    target_of(_tiled_matmul, format_name) for format_name in TILE_FORMATS
)
