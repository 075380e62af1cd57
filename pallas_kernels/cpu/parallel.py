"""Fork and join on XLA's own intra-op thread pool.

`parallel(work)` makes `run(call, data, count)`, which calls `work(data, i)` once for each i < count and returns when
all are done. The calling thread takes part: it waits only for items that another thread has already begun, never for a
thread to become free, so targets that fill the pool (several devices, several engines) cannot deadlock. No thread is
created and none spins while idle.
"""

from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba import types
from numba.core import cgutils

from pallas_kernels.cpu import abi
from pallas_kernels.cpu.bridge import OK, api_at, call_at, frame_at
from pallas_kernels.cpu.memory import I64, at, c_entry, c_function, compiled, intrinsic, stack
from pallas_kernels.cpu.simd import load_i64s, store_i64s

# A job is shared by the caller and the tasks it scheduled; the last one frees it, as the pool may start a task long
# after all items are done. Words that threads write lie on cache lines of their own.
_NEXT, _DONE, _OWNERS, _COUNT, _DATA, _JOB_SIZE = 0, 64, 72, 128, 136, 192
_SPINS_BEFORE_YIELD = 2000
_schedule_at, _num_threads_at = at(abi.SCHEDULE_ARGS), at(abi.NUM_THREADS_ARGS)
_destroy_at = at(abi.ERROR_DESTROY_ARGS)
_SCHEDULE_SIZE = abi.size_in_c(abi.SCHEDULE_ARGS)
_NUM_THREADS_SIZE = abi.size_in_c(abi.NUM_THREADS_ARGS)
_DESTROY_SIZE = abi.size_in_c(abi.ERROR_DESTROY_ARGS)

_malloc = c_function("malloc", num_params=1, returns=True)
_free = c_function("free", num_params=1, returns=False)
_sched_yield = c_function("sched_yield", num_params=0, returns=False)


@intrinsic
def atomic_add(context, address, amount):
    """Adds to the int64 at an address and returns the previous value."""

    def lower(c, b, sig, args):
        return b.atomic_rmw("add", b.inttoptr(args[0], I64.as_pointer()), args[1], "acq_rel")

    return types.int64(types.int64, types.int64), lower


@intrinsic
def _atomic_load(context, address):
    def lower(c, b, sig, args):
        return b.load_atomic(b.inttoptr(args[0], I64.as_pointer()), "acquire", 8)

    return types.int64(types.int64), lower


@intrinsic
def _relax(context):
    """Tells an x86 core that this is a spin loop."""

    def lower(c, b, sig, args):
        if llvm.get_process_triple().startswith("x86"):
            fn_type = ir.FunctionType(ir.VoidType(), [])
            b.call(cgutils.get_or_insert_function(b.module, fn_type, "llvm.x86.sse2.pause"), [])
        return c.get_dummy_value()

    return types.void(), lower


def c_address(function: Any) -> Any:
    """A compiled function () -> address of the compiled `function(int64) -> int64` as C code."""

    @intrinsic
    def address(context):
        def lower(c, b, sig, args):
            function.compile((types.int64,))
            overload = function.overloads[(types.int64,)]
            c.active_code_library.add_linking_library(overload.library)
            entry = c_entry(c, b.module, overload, "c." + overload.fndesc.llvm_func_name)
            return b.ptrtoint(entry, I64)

        return types.int64(), lower

    return address


@compiled
def _failed(call, error):
    """Whether a call went wrong; disposes of an error that has a fallback."""
    if error == OK:
        return False
    address = stack(24)
    args = _destroy_at(address)
    args.struct_size, args.extension_start, args.error = _DESTROY_SIZE, 0, error
    call_at(api_at(frame_at(call).api).Error_Destroy, address)
    return True


@compiled
def num_threads(call):
    """Size of the pool; 1 when there is none."""
    frame, address, count = frame_at(call), stack(32), stack(8)
    args = _num_threads_at(address)
    args.struct_size, args.extension_start = _NUM_THREADS_SIZE, 0
    args.ctx, args.num_threads = frame.ctx, count
    if _failed(call, call_at(api_at(frame.api).ThreadPool_NumThreads, address)):
        return 1
    return load_i64s(count)


@compiled
def _schedule(call, task, data):
    frame, address = frame_at(call), stack(40)
    args = _schedule_at(address)
    args.struct_size, args.extension_start = _SCHEDULE_SIZE, 0
    args.ctx, args.task, args.data = frame.ctx, task, data
    return not _failed(call, call_at(api_at(frame.api).ThreadPool_Schedule, address))


@compiled
def _release(job):
    if atomic_add(job + _OWNERS, -1) == 1:
        _free(job)


@compiled
def _new_job(data, count, owners):
    job = _malloc(_JOB_SIZE)
    store_i64s(job + _NEXT, 0)
    store_i64s(job + _DONE, 0)
    store_i64s(job + _OWNERS, owners)
    store_i64s(job + _COUNT, count)
    store_i64s(job + _DATA, data)
    return job


@compiled
def _start_others(call, job, task, num_others):
    for _ in range(num_others):
        if not _schedule(call, task, job):
            _release(job)


@compiled
def _wait(job, count):
    """Until all items are done; those still missing are being worked on by other threads."""
    spins = 0
    while _atomic_load(job + _DONE) < count:
        spins += 1
        if spins < _SPINS_BEFORE_YIELD:
            _relax()
        else:
            _sched_yield()
    _release(job)


def parallel(work: Any) -> Any:
    """`run(call, data, count)` for the compiled function `work(data, i)`."""

    @compiled
    def drain(job):
        data, count = load_i64s(job + _DATA), load_i64s(job + _COUNT)
        done, i = 0, atomic_add(job + _NEXT, 1)
        while i < count:
            work(data, i)
            done, i = done + 1, atomic_add(job + _NEXT, 1)
        atomic_add(job + _DONE, done)

    @compiled
    def task(job):
        drain(job)
        _release(job)
        return 0

    task_address = c_address(task)

    @compiled
    def run(call, data, count):
        num_others = min(num_threads(call), count) - 1
        job = _new_job(data, count, max(num_others, 0) + 1)
        _start_others(call, job, task_address(), num_others)
        drain(job)
        _wait(job, count)

    return run
