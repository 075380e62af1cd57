"""Buffers keep their values and their places when the system is asked for huge pages, and where it has none."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.engine import host_memory

MEGABYTE = 2**20


def tree():
    rng = np.random.default_rng(0)
    small = jnp.asarray(rng.integers(0, 255, 1001, np.uint8))
    return {"small": small, "matrix": jnp.asarray(rng.standard_normal((300, 700), np.float32)), "empty": jnp.zeros(0)}


def test_arrays_lie_one_after_another_with_their_values():
    before = tree()
    after = host_memory.one_after_another(before)
    for name, array in before.items():
        assert (after[name].dtype, after[name].shape) == (array.dtype, array.shape)
        assert (np.asarray(after[name]) == np.asarray(array)).all()
    places = {name: array.unsafe_buffer_pointer() for name, array in after.items() if array.size}
    assert places["small"] - places["matrix"] == -(-before["matrix"].nbytes // 64) * 64  # leaves come in order of names


def test_moved_buffers_are_those_that_were_there():
    cache = jnp.arange(5 * MEGABYTE, dtype=jnp.float32)
    place = cache.unsafe_buffer_pointer()
    moved = host_memory.in_huge_pages((cache, jnp.zeros(3)))
    assert moved in (0, *range(16 * MEGABYTE, 20 * MEGABYTE + 1, 2 * MEGABYTE))
    assert cache.unsafe_buffer_pointer() == place
    assert float(cache[-1]) == 5 * MEGABYTE - 1


@pytest.mark.parametrize("platform", ["darwin", "win32"])
def test_without_the_call_nothing_changes(monkeypatch, platform):
    monkeypatch.setattr(host_memory.sys, "platform", platform)
    assert host_memory.in_huge_pages(jnp.zeros(5 * MEGABYTE)) == 0
    assert (jax.device_get(host_memory.one_after_another(tree()))["matrix"] == np.asarray(tree()["matrix"])).all()


def test_freed_memory_is_kept_where_the_library_can(monkeypatch):
    """A buffer that is freed and allocated again is there without a single page fault."""
    code = (
        "import resource; from jaxserve.engine.host_memory import keep_freed_memory; import ctypes\n"
        "kept = keep_freed_memory(); libc = ctypes.CDLL(None); libc.malloc.restype = ctypes.c_void_p\n"
        "libc.malloc.argtypes = [ctypes.c_size_t]; libc.free.argtypes = [ctypes.c_void_p]\n"
        "def touch():\n"
        "    block = libc.malloc(100 << 20); ctypes.memset(block, 1, 100 << 20); libc.free(block)\n"
        "touch(); before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt; touch()\n"
        "print(kept, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)"
    )
    kept, faults = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    assert kept == "False" or int(faults) < 1000  # 25,600 pages
    monkeypatch.setattr(host_memory.sys, "platform", "darwin")
    assert not host_memory.keep_freed_memory()
