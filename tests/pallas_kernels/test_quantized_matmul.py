"""The two ways to multiply by a decoded weight, against float64."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.quant.formats import FORMATS
from pallas_kernels.kernels import REFERENCE, XLA


@pytest.mark.parametrize("kernels", [REFERENCE, XLA], ids=lambda k: k.name)
@pytest.mark.parametrize("format_name", ["F32", "BF16", "Q4_1", "Q8_0"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_matches_float64(kernels, format_name, dtype):
    rng = np.random.default_rng(0)
    weight = FORMATS[format_name].encode(rng.standard_normal((48, 64), np.float32))
    x = jnp.asarray(rng.standard_normal((5, 64), np.float32), dtype)
    want = np.asarray(x, np.float64) @ np.asarray(weight.decode(), np.float64).T
    # float32 sums of 64 terms; rounding the weight to bfloat16 costs 2^-9 of each term
    tolerance = 0.06 if dtype == "bfloat16" and kernels is XLA else 2e-5
    np.testing.assert_allclose(kernels.quantized_matmul(x, weight), want, atol=tolerance)
