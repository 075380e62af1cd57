"""The machine code that writes latents into their pages, in place: one FFI target for each dtype of the cache.

Imported by the compiling child only.
"""

from typing import Any

import numpy as np

from pallas_kernels.cpu import abi
from pallas_kernels.cpu.bridge import OK, arg, declare, dim, fail, ret
from pallas_kernels.cpu.memory import at, compiled, stack, text
from pallas_kernels.cpu.parallel import parallel
from pallas_kernels.cpu.simd import load_f32, load_i64s, store_f32
from pallas_kernels.cpu.simd_math import load_i32s, store_bf16
from pallas_kernels.paged_attention.cpu_checks_compiled import SUB, layout_check_of
from pallas_kernels.paged_attention.cpu_write_compiled import find_slots

_TOKENS_AT_ONCE = 64  # of an item of work

_JOB = np.dtype([(word, np.int64) for word in ("source", "cache", "slots", "size", "num_tokens")])
_JOB_BYTES = _JOB.itemsize
_job_at = at(_JOB)


def _work_with(store: Any, item_bytes: int) -> Any:
    """A compiled function `work(job, i)`: the tokens of item i."""

    @compiled
    def work(address, i):
        job = _job_at(address)
        for token in range(i * _TOKENS_AT_ONCE, min((i + 1) * _TOKENS_AT_ONCE, job.num_tokens)):
            slot = load_i64s(job.slots + 8 * token)
            source, target = job.source + 4 * job.size * token, job.cache + item_bytes * job.size * slot
            for h in range(0, job.size if slot >= 0 else 0, 16):
                store(target + item_bytes * h, load_f32(source + 4 * h))

    return work


def _operand_checks(name: str) -> Any:
    """A compiled function that compares the sizes of the latents, the cache and the results."""
    wrong_size = f"{name}: latents of %lld for rows of %lld; a multiple of 16 is needed"
    wrong_pages = f"{name}: %lld tokens a page are no multiple of 16"
    wrong_slots = f"{name}: %lld bytes of slots for %lld tokens"
    wrong_layer = f"{name}: layer %lld of %lld"
    wrong_alias = f"{name}: the cache is not updated in place"

    @compiled
    def check(call):
        latent, cache, layer = arg(call, 0), arg(call, 1), load_i32s(arg(call, 5).data)
        num_slot_bytes = dim(ret(call, 1), 0)
        if dim(latent, 1) != dim(cache, 3) or dim(latent, 1) % SUB != 0:
            return fail(call, abi.INVALID_ARGUMENT, text(wrong_size), dim(latent, 1), dim(cache, 3), 0)
        if dim(cache, 2) < SUB or dim(cache, 2) % SUB != 0:
            return fail(call, abi.INVALID_ARGUMENT, text(wrong_pages), dim(cache, 2), 0, 0)
        if num_slot_bytes != 8 * dim(latent, 0):
            return fail(call, abi.INVALID_ARGUMENT, text(wrong_slots), num_slot_bytes, dim(latent, 0), 0)
        if layer < 0 or layer >= dim(cache, 0):
            return fail(call, abi.INVALID_ARGUMENT, text(wrong_layer), layer, dim(cache, 0), 0)
        if cache.data != ret(call, 0).data:
            return fail(call, abi.INVALID_ARGUMENT, text(wrong_alias), 0, 0, 0)
        return OK

    return check


def _target(name: str, dtype: int, store: Any, item_bytes: int) -> Any:
    """The FFI target for one dtype of the cache; its last result is a workspace of 8 bytes a token."""
    check, check_layout = _operand_checks(name), layout_check_of(name, 2)
    run = parallel(_work_with(store, item_bytes))

    @compiled
    def body(call):
        latent, cache, lengths, starts, table = arg(call, 0), arg(call, 1), arg(call, 2), arg(call, 3), arg(call, 4)
        num_tokens = dim(latent, 0)
        error = check(call)
        if error == OK:
            error = check_layout(call, num_tokens)
        if error != OK:
            return error
        address = stack(_JOB_BYTES)
        job = _job_at(address)
        job.source, job.cache, job.slots = latent.data, cache.data, ret(call, 1).data
        job.size, job.num_tokens = dim(latent, 1), num_tokens
        layer, num_pages, page_size = load_i32s(arg(call, 5).data), dim(cache, 1), dim(cache, 2)
        find_slots(lengths, starts, table, layer, num_pages, page_size, num_tokens, job.slots)
        run(call, address, (num_tokens + _TOKENS_AT_ONCE - 1) // _TOKENS_AT_ONCE)
        return OK

    layout = [(abi.S32, 1), (abi.S32, 1), (abi.S32, 2), (abi.S32, 0)]
    return declare(name, body, args=[(abi.F32, 2), (dtype, 4), *layout], rets=[(dtype, 4), (abi.U8, 1)])


write_float32 = _target("write_latent float32", abi.F32, store_f32, 4)
write_bfloat16 = _target("write_latent bfloat16", abi.BF16, store_bf16, 2)
