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


SMAPS = """\
7f00-7f10 r-xp 00000000 08:01 1  /lib/libone.so.1
Size: 64 kB
Anonymous:             0 kB
7f10-7f20 r--p 00010000 08:01 1  /lib/libone.so.1
Anonymous:             4 kB
7f20-7f30 rw-p 00020000 08:01 1  /lib/libone.so.1
Anonymous:             0 kB
7f30-7f50 r--p 00000000 08:01 2  /lib/two words.so
Anonymous:             0 kB
7f50-7f60 r--s 00000000 08:01 3  /lib/three.so
Anonymous:             0 kB
7f60-7f70 r--p 00000000 08:01 4  /models/model.gguf
Anonymous:             0 kB
7f70-7f80 r-xp 00000000 00:00 0
Anonymous:             0 kB
7f80-7f90 r-xp 00000000 08:01 5  /lib/five.so (deleted)
Anonymous:             0 kB
"""


def test_only_clean_code_of_libraries_is_unmapped(monkeypatch, tmp_path):
    advised = []
    monkeypatch.setattr(host_memory, "_advise", lambda *arguments: advised.append(arguments))
    mappings = tmp_path / "smaps"
    host_memory.unmap_unused_code(mappings)  # a system without it
    mappings.write_text(SMAPS)
    host_memory.unmap_unused_code(mappings)
    assert advised == [(0x7F00, 0x10, host_memory._MADV_DONTNEED), (0x7F30, 0x20, host_memory._MADV_DONTNEED)]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux has the call")
def test_unmapped_code_comes_back_when_it_runs():
    def resident_kilobytes() -> int:
        with open("/proc/self/status") as status:
            return next(int(line.split()[1]) for line in status if line.startswith("RssFile"))

    want = np.asarray(jnp.sin(jnp.arange(8.0)) @ jnp.ones((8, 3)))
    before = resident_kilobytes()
    host_memory.unmap_unused_code()
    assert resident_kilobytes() < before - 10_000  # of jaxlib alone more is mapped
    assert (np.asarray(jnp.sin(jnp.arange(8.0)) @ jnp.ones((8, 3))) == want).all()
