"""Tiny targets that show what XLA hands to a target and how its thread pool behaves. Imported by the compiler only."""

from pallas_kernels.cpu import abi
from pallas_kernels.cpu.bridge import OK, arg, attr_f32, attr_i64, declare, dim, fail, ret
from pallas_kernels.cpu.memory import compiled, text
from pallas_kernels.cpu.parallel import atomic_add, num_threads, parallel
from pallas_kernels.cpu.simd import f32, load_f32, splat_f32, store_f32, store_i64s


@compiled
def _scale(call):
    """x * scale + add."""
    x, out = arg(call, 0), ret(call, 0)
    n = dim(x, 0) * dim(x, 1)
    if n % 16 != 0:
        return fail(call, abi.INVALID_ARGUMENT, text("scale: size %lld is not a multiple of 16"), n, 0, 0)
    for i in range(0, n, 16):
        y = load_f32(x.data + 4 * i) * splat_f32(attr_f32(call, 1))
        store_f32(out.data + 4 * i, y + splat_f32(f32(attr_i64(call, 0))))
    return OK


scale = declare("scale", _scale, args=[(abi.F32, 2)], rets=[(abi.F32, 2)], attrs={"scale": abi.F32, "add": abi.S64})


@compiled
def _spin_item(data, i):
    """Some 100 us of work, counted."""
    x = splat_f32(f32(1.0))
    for _ in range(30000):
        x = x * splat_f32(f32(1.0000001)) + splat_f32(f32(1e-9))
    store_f32(data + 64 + 64 * i, x)
    atomic_add(data, 1)


_run_spin = parallel(_spin_item)


@compiled
def _spin(call):
    """`items` items of work in parallel; the first word of the result counts them."""
    out = ret(call, 0).data
    store_i64s(out, 0)
    _run_spin(call, out, attr_i64(call, 0))
    return OK


spin = declare("spin", _spin, args=[(abi.F32, 1)], rets=[(abi.U8, 1)], attrs={"items": abi.S64})


@compiled
def _threads(call):
    """The size of the pool as kernels see it, in the first eight bytes."""
    store_i64s(ret(call, 0).data, num_threads(call))
    return OK


threads = declare("threads", _threads, args=[], rets=[(abi.U8, 1)])
