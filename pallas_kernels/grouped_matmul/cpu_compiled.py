"""The machine code of tiled_grouped_matmul: one FFI target for each format.

Imported by the compiling child only. As the targets of quantized_matmul/cpu_compiled.py, with the tiles of all experts
one after the other, one more operand, the rows of each expert [E] int32, and one more result, room for a job of each
expert. An expert with rows is a product of its own; what is parallel are the items of all of them.
"""

import numpy as np

from pallas_kernels.cpu import abi
from pallas_kernels.cpu.bridge import OK, arg, declare_shared, dim, fail, ret
from pallas_kernels.cpu.memory import at, compiled, stack, text
from pallas_kernels.cpu.parallel import parallel
from pallas_kernels.cpu.simd import load_i64s, store_i64s
from pallas_kernels.quantized_matmul.cpu_compiled import check, describe, multiply_item, plan, target_of
from pallas_kernels.quantized_matmul.rows import EXTRA_ROWS, JOB_BYTES
from pallas_kernels.quantized_matmul.rows_compiled import job_at, write_row
from pallas_kernels.quantized_matmul.tiles import TILE_FORMATS

_size_at = at(np.int32)
_WRONG_SIZES = "tiled_grouped_matmul: the groups have %lld rows together, or one has less than 0; x has %lld"
_WRONG_ROOM = "tiled_grouped_matmul: room for jobs of %lld bytes, expected %lld"


@compiled
def _job_with(jobs, i, is_row):
    """Address of the job that item i, or row i, belongs to: the last one that begins at or before it. `jobs` is the
    address of two words: of the first job, and how many there are."""
    first, k = load_i64s(jobs), load_i64s(jobs + 8) - 1
    while k > 0:
        job = job_at(first + k * JOB_BYTES)
        if (job.first_row if is_row else job.first_item) <= i:
            break
        k -= 1
    return first + k * JOB_BYTES


@compiled
def _write_row(jobs, i):
    address = _job_with(jobs, i, True)
    write_row(address, i - job_at(address).first_row)


@compiled
def _multiply_item(jobs, i):
    address = _job_with(jobs, i, False)
    multiply_item(address, i - job_at(address).first_item)


_write_rows, _multiply = parallel(_write_row), parallel(_multiply_item)


@compiled
def _rows_of(sizes, expert):
    """An expert's rows."""
    return np.int64(_size_at(sizes + 4 * expert))


@compiled
def _add_job(whole, target, expert, first_row, num_rows, record_rows):
    """Fills the job at `target` with an expert's share of the whole one at `whole`."""
    for word in range(0, JOB_BYTES, 8):
        store_i64s(target + word, load_i64s(whole + word))
    job = job_at(target)
    job.first_row, job.num_rows = first_row, num_rows
    job.x += 4 * first_row * job.row_stride
    job.out += 4 * first_row * job.num_outputs
    job.tiles += expert * job.num_groups * job.group_bytes
    job.records += record_rows * job.num_blocks * job.record_bytes


@compiled
def _body(call, settings):
    whole, jobs = stack(240), stack(16)
    job = job_at(whole)
    num_experts, room = dim(arg(call, 4), 0), dim(ret(call, 2), 0)
    describe(call, job, settings, num_experts)
    error = check(call, job)
    if error != OK:
        return error
    if room != num_experts * JOB_BYTES:
        return fail(call, abi.INVALID_ARGUMENT, text(_WRONG_ROOM), room, num_experts * JOB_BYTES, room)
    sizes, first_job = arg(call, 4).data, ret(call, 2).data
    num_jobs, num_items, first_row, is_good = 0, 0, 0, True
    for expert in range(num_experts):
        num_rows = _rows_of(sizes, expert)
        is_good = is_good and num_rows >= 0
        if is_good and num_rows > 0 and first_row + num_rows <= job.num_rows:
            target = first_job + num_jobs * JOB_BYTES
            _add_job(whole, target, expert, first_row, num_rows, first_row + EXTRA_ROWS * num_jobs)
            job_at(target).first_item = num_items
            num_items += plan(job_at(target))
            num_jobs += 1
        first_row += num_rows
    if not is_good or first_row != job.num_rows:
        return fail(call, abi.INVALID_ARGUMENT, text(_WRONG_SIZES), first_row, job.num_rows, job.num_rows)
    store_i64s(jobs, first_job)
    store_i64s(jobs + 8, num_jobs)
    _write_rows(call, jobs, job.num_rows)
    _multiply(call, jobs, num_items)
    return OK


_tiled_grouped_matmul = declare_shared(
    "tiled_grouped_matmul",
    _body,
    args=[(abi.F32, 2), (abi.U8, 1), (abi.F32, 1), (abi.F32, 2), (abi.S32, 1)],
    rets=[(abi.F32, 2), (abi.U8, 1), (abi.U8, 1)],
    attrs={"before": abi.S64, "eps": abi.F32, "span_blocks": abi.S64},
)
q4_0, q4_1, q5_0, q5_1, q8_0, q4_k, q5_k, q6_k, int8, int4, f32, f16, bf16 = (
    target_of(_tiled_grouped_matmul, format_name) for format_name in TILE_FORMATS
)
