"""What a target answers to calls that do not fit its declaration."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

OUT = jax.ShapeDtypeStruct((4, 8), jnp.float32)
GOOD = {"scale": np.float32(2.5), "add": np.int64(1)}


@pytest.fixture
def call(probes):
    def scaled(*args, outs=OUT, **attrs):
        return jax.block_until_ready(jax.ffi.ffi_call(probes.name_of("ffi_probes:scale"), outs)(*args, **attrs))

    return scaled


def test_runs(call):
    np.testing.assert_array_equal(call(jnp.ones((4, 8)), **GOOD), np.full((4, 8), 3.5))


@pytest.mark.parametrize(
    ("args", "attrs", "message"),
    [
        ([np.ones((3, 3), np.float32)], GOOD, "size 9 is not a multiple of 16"),
        ([np.ones((4, 8), np.int32)], GOOD, "argument 0 has XLA dtype 4, expected 11"),
        ([np.ones(32, np.float32)], GOOD, "argument 0 has rank 1, expected 2"),
        ([np.ones((4, 8), np.float32)] * 2, GOOD, "got 2 arguments, expected 1"),
        ([np.ones((4, 8), np.float32)], {"scale": GOOD["scale"]}, r"got 1 attributes, expected 2 \(add, scale\)"),
        ([np.ones((4, 8), np.float32)], {"scale": GOOD["scale"], "sub": GOOD["add"]}, "attribute 0 is not one of"),
        ([np.ones((4, 8), np.float32)], {"scale": "2.5", "add": GOOD["add"]}, "attribute 1 is not one of"),
    ],
)
def test_refuses(call, args, attrs, message):
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        call(*args, **attrs)


def test_refuses_more_results(call):
    with pytest.raises(jax.errors.JaxRuntimeError, match="got 2 results, expected 1"):
        call(jnp.ones((4, 8)), outs=(OUT, OUT), **GOOD)


def test_works_after_an_error(call):
    with pytest.raises(jax.errors.JaxRuntimeError, match="size 9"):
        call(jnp.ones((3, 3)), **GOOD)
    test_runs(call)
