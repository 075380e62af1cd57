"""The activations' way into the workspace: norm or gated unit, then rounding to int8; the same code for all formats.

Imported by the compiling child only. rows.py describes the records.
"""

import numpy as np

from pallas_kernels.cpu.activations import gelu_tanh, inverse_rms, load_up_to, silu
from pallas_kernels.cpu.memory import at, compiled
from pallas_kernels.cpu.simd import (
    f32,
    hsum_i32,
    i32,
    largest_magnitude,
    round_even,
    splat_f32,
    store_f32,
    store_f32s,
    store_i32_as_i8,
    store_i32s,
    target_has,
    to_i32,
)
from pallas_kernels.quantized_matmul.formats_compiled import SECOND_SUM, STEP, SUM
from pallas_kernels.quantized_matmul.rows import GELU_TANH, RMS_NORM, SILU
from pallas_kernels.quantized_matmul.tiles import BLOCK_LENGTH

_SMALLEST_PEAK = np.float32(2.0**-100)
# A tile of rows has its sums in registers, of which older CPUs have fewer.
LARGEST_TILE = 8 if target_has("avx512f") else 4
# What becomes of a block's sum (`job.sums`).
NOT_ROUNDED, SCALED_SUM, ZERO_TIMES_SUM, ZERO_TIMES_HALVES = range(4)

# Settings of a format: its code (`group_work`), how its tiles and records lie, what becomes of sums.
SETTINGS = (
    "work", "quant_bytes", "scale_bytes", "span_bytes", "record_bytes", "format_span", "sums", "zero",
)  # fmt: skip
# Then addresses (0 where an optional operand is missing), sizes, and how the work is cut.
_WORDS = (
    *SETTINGS, "x", "tiles", "norm", "residual", "out", "records",
    "num_rows", "num_inputs", "num_outputs", "num_blocks", "num_groups", "num_spans", "span_blocks", "group_bytes",
    "groups_per_item", "items_per_chunk", "before", "row_stride", "num_experts", "first_row", "first_item",
)  # fmt: skip
JOB = np.dtype([*((word, np.int64) for word in _WORDS), ("eps", np.float64)])
job_at = at(JOB)


@compiled
def rows_of_tile(num_left):
    """Rows of the next tile. One of 8 costs less than 4 + 1 + 1, one of 4 not more than 1 + 1: then with rows to spare.

    Tiles of 16 rows were no faster: 8 rows already take eleven of twelve cycles for products that cannot be saved.
    """
    if LARGEST_TILE == 8 and num_left >= 6:
        return 8
    return 4 if num_left >= 2 else 1


@compiled
def record_of(job, row):
    """Address of a row's first record, and how far it is to that of the next block."""
    start = row // LARGEST_TILE * LARGEST_TILE
    size = rows_of_tile(job.num_rows - start)
    if start + size <= row:  # 5 rows are left: 4 and 1
        start += size
        size = rows_of_tile(job.num_rows - start)
    record = job.records + (start * job.num_blocks + row - start) * job.record_bytes
    return record, size * job.record_bytes


@compiled
def _sixteen(job, x, i, scale):
    """What the product multiplies, inputs i to i + 15 of the row at x."""
    num_left = job.num_inputs - i
    values = load_up_to(x + 4 * i, num_left)
    if job.before == RMS_NORM:
        return values * splat_f32(scale) * load_up_to(job.norm + 4 * i, num_left)
    if job.before == SILU:
        return silu(values) * load_up_to(x + 4 * (job.num_inputs + i), num_left)
    if job.before == GELU_TANH:
        return gelu_tanh(values) * load_up_to(x + 4 * (job.num_inputs + i), num_left)
    return values


@compiled
def _round(job, record, a, b):
    """Fills a record with the block of values a and b."""
    peak = largest_magnitude(a, b)
    inverse = f32(127.0) / peak if peak >= _SMALLEST_PEAK else f32(0.0)
    a_quants = to_i32(round_even(a * splat_f32(inverse)))
    b_quants = to_i32(round_even(b * splat_f32(inverse)))
    store_i32_as_i8(record, a_quants)
    store_i32_as_i8(record + 16, b_quants)
    step = peak / f32(127.0)
    store_f32s(record + STEP, step)
    if job.sums == ZERO_TIMES_HALVES:
        store_i32s(record + SUM, i32(-job.zero * hsum_i32(a_quants)))
        store_i32s(record + SECOND_SUM, i32(-job.zero * hsum_i32(b_quants)))
        return
    whole = hsum_i32(a_quants + b_quants)
    if job.sums == SCALED_SUM:
        store_f32s(record + SUM, step * f32(whole))
    else:
        store_i32s(record + SUM, i32(-job.zero * whole))


@compiled
def write_row(address, row):
    """Row `row` of the activations, into its records."""
    job = job_at(address)
    x = job.x + 4 * job.row_stride * row
    scale = inverse_rms(x, job.num_inputs, f32(job.eps)) if job.before == RMS_NORM else f32(1.0)
    record, to_next = record_of(job, row)
    for i in range(0, BLOCK_LENGTH * job.num_blocks, BLOCK_LENGTH):
        a, b = _sixteen(job, x, i, scale), _sixteen(job, x, i + 16, scale)
        if job.sums == NOT_ROUNDED:
            store_f32(record, a)
            store_f32(record + 64, b)
        else:
            _round(job, record, a, b)
        record += to_next
