"""The machine code of tiled_matmul: one FFI target for each format (see tiles.py for the layout).

Imported by the compiling child only. A target takes x [T, X] float32, the tiles, the weight of a norm [I] or [0] and a
residual [T, O] or [0, 0], and fills the result [T, O] float32 and a workspace with the activations (rows.py). Its
attributes: `before`, a code of rows.py; `eps` of the norm; `span_blocks`, the blocks of a span or 0.
"""

from typing import Any

import numpy as np

from pallas_kernels.cpu import abi
from pallas_kernels.cpu.activations import load_up_to
from pallas_kernels.cpu.bridge import OK, arg, attr_f32, attr_i64, declare, dim, fail, ret
from pallas_kernels.cpu.memory import compiled, stack, text
from pallas_kernels.cpu.parallel import parallel
from pallas_kernels.cpu.simd import (
    fma,
    load_f32,
    repeat,
    replace,
    splat_f32,
    splat_load_f32,
    store_f32,
    store_first_f32,
)
from pallas_kernels.quantized_matmul.formats_compiled import LOAD_VALUES, VECTORS, add_block_of, scales_of
from pallas_kernels.quantized_matmul.rows import EXTRA_ROWS, GELU_TANH, NO_BEFORE, RMS_NORM, record_bytes
from pallas_kernels.quantized_matmul.rows_compiled import (
    JOB,
    JOB_BYTES,
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
_ITEM_COST = 4000  # about a microsecond, in the cycles of `_plan`


@compiled
def _store_rows(job, sums, row, num_rows, column):
    """Writes the sums at `sums`, 16 for each row, into the result, plus the residual."""
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


def _tile_of(fmt: TileFormat, num_rows: int) -> Any:
    """A compiled function: the products of `num_rows` rows with one group of 16 outputs.

    Each row's arithmetic is the same for any number of rows, so that a row's result does not depend on the others.
    """
    vectors, add_block = VECTORS[fmt.bits], add_block_of(fmt)
    read_span, read_scales, finish = scales_of(fmt)
    quant_bytes, scale_bytes, span_bytes = fmt.quant_bytes, fmt.scale_bytes, fmt.span_bytes
    row_bytes = record_bytes(fmt)

    @compiled
    def tile(address, group, row, column):
        job = job_at(address)
        num_blocks, span_blocks = job.num_blocks, job.span_blocks
        record = job.records + row * num_blocks * row_bytes
        block_scales = group + num_blocks * quant_bytes
        acc = repeat(splat_f32(_ZERO), num_rows)
        k, span = 0, block_scales + num_blocks * scale_bytes - span_bytes
        while k < num_blocks:
            span += span_bytes
            shared, end = read_span(span), min(k + span_blocks, num_blocks)
            while k < end:
                weights = vectors(group + k * quant_bytes)
                scales = read_scales(shared, block_scales + k * scale_bytes)
                for r in range(num_rows):
                    acc = replace(acc, r, add_block(acc[r], weights, scales, record + r * row_bytes))
                record += num_rows * row_bytes
                k += 1
        sums = stack(1024)
        for r in range(num_rows):
            store_f32(sums + 64 * r, finish(acc[r], span))
        _store_rows(job, sums, row, num_rows, column)

    return tile


def _float_tile_of(fmt: TileFormat, num_rows: int) -> Any:
    """As `_tile_of`, for values that are not quantized."""
    load, value_bytes, row_bytes = LOAD_VALUES[fmt.dtype], fmt.bits // 8, record_bytes(fmt)
    vector_bytes = GROUP_LENGTH * value_bytes

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
        sums = stack(1024)
        for r in range(num_rows):
            store_f32(sums + 64 * r, even[r] + odd[r])
        _store_rows(job, sums, row, num_rows, column)

    return tile


def group_work(fmt: TileFormat) -> Any:
    """A compiled function `work(address, i)`: item i's groups of outputs with its chunk of rows."""
    tile_of = _tile_of if fmt.is_quantized else _float_tile_of
    tile1, tile4, tile8 = (tile_of(fmt, num_rows) for num_rows in (1, 4, 8))
    tile16 = tile_of(fmt, 16) if _largest_tile_of(fmt) == 16 else tile8
    quant_bytes, scale_bytes, span_bytes = fmt.quant_bytes, fmt.scale_bytes, fmt.span_bytes

    @compiled
    def work(address, i):
        job = job_at(address)
        group_bytes = job.num_blocks * (quant_bytes + scale_bytes) + job.num_spans * span_bytes
        chunk, item = i // job.items_per_chunk, i % job.items_per_chunk
        start, end = chunk * job.rows_per_chunk, min((chunk + 1) * job.rows_per_chunk, job.num_rows)
        first = item * job.groups_per_item
        for g in range(first, min(first + job.groups_per_item, job.num_groups)):
            group, row, column = job.tiles + g * group_bytes, start, g * GROUP_LENGTH
            while row < end:
                size = rows_of_tile(job.num_rows - row, job.largest_tile)
                if size == 16:
                    tile16(address, group, row, column)
                elif size == 8:
                    tile8(address, group, row, column)
                elif size == 4:
                    tile4(address, group, row, column)
                else:
                    tile1(address, group, row, column)
                row += size

    return work


@compiled
def _plan(job):
    """Cuts the work into items of a microsecond or more and returns how many there are."""
    cost = job.num_blocks * (30 + 12 * min(job.num_rows, _ROWS_PER_CHUNK))
    job.rows_per_chunk = _ROWS_PER_CHUNK
    job.groups_per_item = max(1, min(_ITEM_COST // cost, job.num_groups // 4))
    job.items_per_chunk = (job.num_groups + job.groups_per_item - 1) // job.groups_per_item
    return (job.num_rows + _ROWS_PER_CHUNK - 1) // _ROWS_PER_CHUNK * job.items_per_chunk


def _checks(fmt: TileFormat, name: str) -> Any:
    """A compiled function that compares all sizes of a call, as far as they are in the job."""
    wrong_before = f"{name}: attribute before is %lld, expected 0 to 3"
    wrong_columns = f"{name}: x has %lld columns, an odd number: no gate and up"
    wrong_rows = f"{name}: x has %lld rows, the result %lld"
    wrong_norm = f"{name}: a norm's weight of %lld values, expected %lld"
    wrong_residual = f"{name}: a residual of [%lld, %lld], not the result's shape"
    wrong_tiles = f"{name}: tiles of %lld bytes, expected %lld for this O and I"
    wrong_workspace = f"{name}: workspace of %lld bytes, expected %lld"
    block_bytes, span_bytes, row_bytes = fmt.quant_bytes + fmt.scale_bytes, fmt.span_bytes, record_bytes(fmt)

    @compiled
    def check(call, job):
        if job.before < NO_BEFORE or job.before > GELU_TANH:
            return fail(call, abi.INVALID_ARGUMENT, text(wrong_before), job.before, 0, 0)
        if job.before > RMS_NORM and job.row_stride % 2 != 0:
            return fail(call, abi.INVALID_ARGUMENT, text(wrong_columns), job.row_stride, 0, 0)
        out_rows = dim(ret(call, 0), 0)
        if out_rows != job.num_rows:
            return fail(call, abi.INVALID_ARGUMENT, text(wrong_rows), job.num_rows, out_rows, 0)
        size, expected = dim(arg(call, 2), 0), job.num_inputs if job.before == RMS_NORM else 0
        if size != expected:
            return fail(call, abi.INVALID_ARGUMENT, text(wrong_norm), size, expected, 0)
        rows, columns = dim(arg(call, 3), 0), dim(arg(call, 3), 1)
        if (rows != 0 or columns != 0) and (rows != job.num_rows or columns != job.num_outputs):
            return fail(call, abi.INVALID_ARGUMENT, text(wrong_residual), rows, columns, 0)
        size = dim(arg(call, 1), 0)
        expected = job.num_groups * (job.num_blocks * block_bytes + job.num_spans * span_bytes)
        if size != expected:
            return fail(call, abi.INVALID_ARGUMENT, text(wrong_tiles), size, expected, 0)
        size, expected = dim(ret(call, 1), 0), (job.num_rows + EXTRA_ROWS) * job.num_blocks * row_bytes
        if size != expected:
            return fail(call, abi.INVALID_ARGUMENT, text(wrong_workspace), size, expected, 0)
        return OK

    return check


def _largest_tile_of(fmt: TileFormat) -> int:
    """Those without scales have two sums for each row."""
    return LARGEST_TILE if fmt.is_quantized else 8


def _sums_of(fmt: TileFormat) -> int:
    if not fmt.is_quantized:
        return NOT_ROUNDED
    if fmt.num_sums == 2:
        return ZERO_TIMES_HALVES
    return SCALED_SUM if fmt.has_minimum else ZERO_TIMES_SUM


def _target(fmt: TileFormat) -> Any:
    """The FFI target of one format."""
    name = f"tiled_matmul {fmt.name}"
    check, write_rows, multiply = _checks(fmt, name), parallel(write_row), parallel(group_work(fmt))
    sums, zero, row_bytes, format_span = _sums_of(fmt), fmt.zero, record_bytes(fmt), fmt.span_blocks
    largest_tile = _largest_tile_of(fmt)
    assert JOB.itemsize == JOB_BYTES == 184, "stack() takes a literal"

    @compiled
    def describe(call, job):
        x, residual, out = arg(call, 0), arg(call, 3), ret(call, 0)
        job.x, job.tiles, job.norm, job.out = x.data, arg(call, 1).data, arg(call, 2).data, out.data
        job.residual = residual.data if dim(residual, 1) != 0 else 0
        job.records = ret(call, 1).data
        job.before, job.eps = attr_i64(call, 0), attr_f32(call, 1)
        job.num_rows, job.row_stride, job.num_outputs = dim(x, 0), dim(x, 1), dim(out, 1)
        job.num_inputs = job.row_stride // 2 if job.before > RMS_NORM else job.row_stride
        job.num_blocks = (job.num_inputs + BLOCK_LENGTH - 1) // BLOCK_LENGTH
        job.num_groups = (job.num_outputs + GROUP_LENGTH - 1) // GROUP_LENGTH
        span_blocks = max(attr_i64(call, 2), format_span)
        job.span_blocks = span_blocks if span_blocks > 0 else max(job.num_blocks, 1)
        job.num_spans = (job.num_blocks + job.span_blocks - 1) // job.span_blocks
        job.sums, job.zero, job.record_bytes, job.largest_tile = sums, zero, row_bytes, largest_tile

    @compiled
    def body(call):
        address = stack(184)
        job = job_at(address)
        describe(call, job)
        error = check(call, job)
        if error != OK:
            return error
        if job.num_rows * job.num_inputs < _PARALLEL_ACTIVATIONS:
            for row in range(job.num_rows):
                write_row(address, row)
        else:
            write_rows(call, address, job.num_rows)
        multiply(call, address, _plan(job))
        return OK

    return declare(
        name,
        body,
        args=[(abi.F32, 2), (abi.U8, 1), (abi.F32, 1), (abi.F32, 2)],
        rets=[(abi.F32, 2), (abi.U8, 1)],
        attrs={"before": abi.S64, "eps": abi.F32, "span_blocks": abi.S64},
    )


q4_0, q4_1, q5_0, q5_1, q8_0 = (_target(TILE_FORMATS[name]) for name in ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"))
q4_k, q5_k, q6_k = (_target(TILE_FORMATS[name]) for name in ("Q4_K", "Q5_K", "Q6_K"))
int8, int4 = (_target(TILE_FORMATS[name]) for name in ("INT8", "INT4"))
f32, f16, bf16 = (_target(TILE_FORMATS[name]) for name in ("F32", "F16", "BF16"))
