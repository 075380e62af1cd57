"""`bench experts`: the layer over devices is the layer on one, and the bytes are those of the exchange."""

import json
import os
import subprocess
import sys

import pytest

from jaxserve.bench.experts import ExpertsSetup


@pytest.mark.parametrize("over", ["expert", "data"])
def test_a_small_layer(over):
    sizes = {"tokens": 8, "experts": 4, "chosen": 2, "hidden-size": 16, "expert-size": 8, "num-rounds": 2}
    flags = [f"--{name}={value}" for name, value in sizes.items()]
    code = "import sys; from jaxserve.cli.main import run; sys.argv[0] = 'jaxserve'; run()"
    environment = os.environ | {"XLA_FLAGS": "", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", code, "bench", "experts", f"--over={over}", *flags, "--json"],
        capture_output=True, text=True, timeout=300, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    figures = {figure["name"]: figure for figure in json.loads(done.stdout)["figures"]}
    assert figures["over devices / one device"]["median"] > 0
    expected = {"expert": (0, 512), "data": (4 * (4 * 16 + 8 * 2), 256)}[over]
    found = [figures[f"{name}, received by a device"]["median"] for name in ("dispatch", "combine")]
    assert found == list(expected)


def test_bytes_grow_with_devices():
    two, eight = (ExpertsSetup(num_devices=n, kind="data") for n in (2, 8))
    assert two.dispatch_bytes < eight.dispatch_bytes < 2 * two.dispatch_bytes
    assert two.combine_bytes < eight.combine_bytes < 2 * two.combine_bytes
