"""Work is divided once, and targets that fill XLA's thread pool do not wait for each other."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[3]


def _num_items_done(name: str, num_items: int) -> int:
    out = jax.ShapeDtypeStruct((64 + 64 * num_items,), jnp.uint8)
    call = jax.ffi.ffi_call(name, out, has_side_effect=True)
    return int(jax.jit(lambda x: call(x, items=np.int64(num_items)))(jnp.ones(8))[0])


@pytest.mark.parametrize("num_items", [0, 1, 2, 3, 17])
def test_every_item_once(probes, num_items):
    assert _num_items_done(probes.name_of("ffi_probes:spin"), num_items) == num_items


EIGHT_DEVICES = """
import sys
from pathlib import Path
cache, machine_code = sys.argv[1:]
sys.path.append(machine_code)
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from pallas_kernels.cpu.targets import register
name = register(["ffi_probes:spin"], cache_dir=Path(cache)).name_of("ffi_probes:spin")
out = jax.ShapeDtypeStruct((64 + 64 * 16,), jnp.uint8)
mesh = Mesh(np.array(jax.devices()), "d")
def local(x):
    done = 0
    for _ in range(10):
        done += jax.ffi.ffi_call(name, out, has_side_effect=True)(x, items=np.int64(16))[0].astype(jnp.int32)
        x = jax.lax.psum(x, "d") * 0.1
    return done[None]
step = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=P("d"), out_specs=P("d"), check_vma=False))
x = jax.device_put(jnp.ones(64), NamedSharding(mesh, P("d")))
for _ in range(3):
    assert step(x).tolist() == [160] * 8
"""


@pytest.mark.parametrize(
    "num_threads", [pytest.param("1", marks=pytest.mark.slow), "2", pytest.param("4", marks=pytest.mark.slow)]
)
def test_eight_devices_do_not_deadlock(probes, kernel_cache, num_threads):
    flags = "--xla_force_host_platform_device_count=8"
    environment = {**os.environ, "NPROC": num_threads, "XLA_FLAGS": flags, "PYTHONPATH": str(ROOT)}
    machine_code = str(Path(__file__).parent / "machine_code")
    command = [sys.executable, "-c", EIGHT_DEVICES, str(kernel_cache), machine_code]
    subprocess.run(command, env=environment, check=True, timeout=200)
