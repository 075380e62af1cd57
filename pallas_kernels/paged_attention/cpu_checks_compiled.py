"""What the machine code of attention and of cache writes checks alike: the cache's arrays and the ragged layout.

Operands of both: one array of tokens first, then the cache's arrays, kv_lengths, query_starts, page_table, layer.
"""

from typing import Any

from pallas_kernels.cpu import abi
from pallas_kernels.cpu.bridge import OK, arg, dim, fail
from pallas_kernels.cpu.memory import compiled, text
from pallas_kernels.cpu.simd import i64
from pallas_kernels.cpu.simd_math import load_i32s

SUB = 16  # positions whose keys lie together in the cache
LARGEST_HEAD = 256


@compiled
def same_dims(x, y, num_dims):
    """Whether two buffers agree in their first dimensions."""
    good = True
    for i in range(num_dims):
        good = good and dim(x, i) == dim(y, i)
    return good


def layout_check_of(name: str, first: int) -> Any:
    """A compiled function `check(call, num_tokens)` of kv_lengths, query_starts and page_table, operands `first` on."""
    wrong_layout = f"{name}: kv_lengths, query_starts and page_table are of %lld, %lld and %lld sequences"
    wrong_starts = f"{name}: query_starts must ascend from 0 up to the number of tokens; [%lld] = %lld, T = %lld"

    @compiled
    def check(call, num_tokens):
        lengths, starts, table = arg(call, first), arg(call, first + 1), arg(call, first + 2)
        num_sequences = dim(lengths, 0)
        if dim(starts, 0) != num_sequences + 1 or dim(table, 0) != num_sequences:
            counts = dim(starts, 0) - 1, dim(table, 0)
            return fail(call, abi.INVALID_ARGUMENT, text(wrong_layout), num_sequences, counts[0], counts[1])
        before = i64(0)
        for b in range(num_sequences + 1):
            start = load_i32s(starts.data + 4 * b)
            if start < before or start > num_tokens:
                return fail(call, abi.INVALID_ARGUMENT, text(wrong_starts), b, start, num_tokens)
            before = start
        return OK

    return check


def checks_of(name: str, has_scales: bool) -> Any:
    """A compiled function `check(call, num_tokens)`, for a cache with or without scales."""
    wrong_head = f"{name}: a head has 16 to 256 values, a multiple of 16; H = %lld"
    wrong_pages = f"{name}: the cache's arrays differ in shape, or %lld is no multiple of 16 tokens a page"
    wrong_layer = f"{name}: layer %lld of %lld"
    first = 5 if has_scales else 3
    check_layout = layout_check_of(name, first)

    @compiled
    def check_pages(call, k, v, layer):
        good = dim(v, 3) == SUB * dim(k, 3) and dim(v, 4) == dim(k, 4) and dim(k, 5) == SUB
        good = good and same_dims(k, v, 3) and dim(v, 3) > 0
        if has_scales:
            good = good and same_dims(arg(call, 3), v, 4) and same_dims(arg(call, 4), v, 4)
        if not good:
            return fail(call, abi.INVALID_ARGUMENT, text(wrong_pages), dim(v, 3), 0, 0)
        if dim(v, 4) < SUB or dim(v, 4) > LARGEST_HEAD or dim(v, 4) % SUB != 0:
            return fail(call, abi.INVALID_ARGUMENT, text(wrong_head), dim(v, 4), 0, 0)
        if layer < 0 or layer >= dim(k, 0):
            return fail(call, abi.INVALID_ARGUMENT, text(wrong_layer), layer, dim(k, 0), 0)
        return OK

    @compiled
    def check(call, num_tokens):
        error = check_pages(call, arg(call, 1), arg(call, 2), load_i32s(arg(call, first + 3).data))
        return error if error != OK else check_layout(call, num_tokens)

    return check
