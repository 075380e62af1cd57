"""The thread pool has the size that was asked for, kernels see that size, and it changes no result."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from jaxserve.config import EngineConfig
from jaxserve.engine import threads
from jaxserve.engine.build import build_engine
from jaxserve.engine.progress import Silent
from jaxserve.errors import ConfigError
from jaxserve.offline import _nproc

ROOT = Path(__file__).resolve().parents[2]
MACHINE_CODE = ROOT / "tests" / "pallas_kernels" / "cpu" / "machine_code"
CACHE = ROOT / ".cache" / "kernels"

# Prints, for each size of the pool: what the choice says, what a kernel sees, and a digest of a product that is large
# enough for all threads. The first pool is made by settle_threads, the others by starting jax anew.
CHILD = f"""
import hashlib, json, os, sys
from pathlib import Path
sizes = json.loads(sys.argv[1])
sys.path.append({str(MACHINE_CODE)!r})
import jax, jax.numpy as jnp, numpy as np
from jax.extend.backend import clear_backends
from jaxserve.engine.threads import settle_threads
from pallas_kernels.cpu.targets import register
from pallas_kernels.quantized_matmul.cpu import function_of, tiled_matmul
choice = settle_threads(sizes[0])
targets = register(["ffi_probes:threads", function_of("Q8_0")], cache_dir=Path({str(CACHE)!r}))
rng = np.random.default_rng(0)
tiles = rng.integers(0, 60, 1024 // 16 * (256 // 32) * 16 * 34, np.uint8)  # as float16, small numbers
x = rng.standard_normal((67, 256), np.float32)
for size in sizes:
    if size != sizes[0]:
        clear_backends()
        os.environ["NPROC"] = str(size)
    seen = jax.ffi.ffi_call(targets.name_of("ffi_probes:threads"), jax.ShapeDtypeStruct((8,), jnp.uint8))()
    y = tiled_matmul(jnp.asarray(x), jnp.asarray(tiles), format_name="Q8_0", num_outputs=1024, targets=targets)
    assert np.isfinite(y).all() and np.ptp(y) > 0
    digest = hashlib.sha256(np.asarray(y)).hexdigest()
    print(json.dumps([choice.value, int(np.asarray(seen).view(np.int64)[0]), digest]))
"""


def run(sizes: list[int]) -> list[list]:
    environment = {name: value for name, value in os.environ.items() if name != "NPROC"} | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", CHILD, json.dumps(sizes)]
    child = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=250)
    assert child.returncode == 0, child.stderr[-2000:]
    return [json.loads(line) for line in child.stdout.splitlines()]


@pytest.fixture(scope="module")
def runs() -> list[list]:
    """Sizes 1 to 8, the first by settle_threads; and two more processes that settle on 2 and 4."""
    return run([1, 2, 3, 4, 5, 6, 7, 8]) + run([2]) + run([4])


def test_kernels_see_the_pool_that_was_asked_for(runs):
    assert [seen for _, seen, _ in runs] == [1, 2, 3, 4, 5, 6, 7, 8, 2, 4]
    assert [value for value, _, _ in runs] == [1] * 8 + [2, 4]


def test_no_bit_depends_on_the_number_of_threads(runs):
    assert len({digest for _, _, digest in runs}) == 1


def test_the_pool_is_measured(tmp_path):
    for number, name in enumerate([*["tf_XLAEigen"] * 3, "python", "tf_XLACompile"]):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "comm").write_text(f"{name}\n")
    (tmp_path / "one that ended").mkdir()
    assert threads.pool_size(tmp_path) == 3
    assert threads.pool_size(tmp_path / "0") is None
    assert threads.pool_size(tmp_path / "no such system") is None


def test_another_size_is_refused_by_name_only(monkeypatch):
    monkeypatch.setattr(threads, "pool_size", lambda: 5)
    monkeypatch.setattr(threads, "usable_cores", lambda: (3, "cores"))
    with pytest.raises(ConfigError, match=r"^--threads 4: JAX already runs with 5 in this process and cannot change"):
        build_engine(EngineConfig(model="m", threads=4), Path("no model"), frozenset(), Silent(), warm_up=False)
    assert threads.settle_threads(5).reason == "--threads"
    assert threads.settle_threads(None).value == 5
    assert threads.settle_threads(None).reason == "JAX was started before in this process, with so many"


@pytest.mark.parametrize(("text", "number"), [("3", 3), ("0", 1), ("", None), ("x", None), ("-2", None), ("1.5", None)])
def test_xlas_own_variable_is_read_as_xla_does(text, number):
    assert _nproc({"NPROC": text}) == number
    assert _nproc({}) is None
