"""Feed-forward layers."""

import jax
from jaxtyping import Array, Float

from jaxserve.layers.linear import linear
from pallas_kernels.kernels import Kernels


def swiglu(kernels: Kernels, x: Float[Array, "T D"], weights: dict) -> Float[Array, "T D"]:
    """down(silu(gate(x)) * up(x)) (Shazeer 2020, arXiv 2002.05202); biases where `weights` has them."""
    gate = linear(kernels, x, weights["gate"], weights.get("gate_bias"))
    up = linear(kernels, x, weights["up"], weights.get("up_bias"))
    return linear(kernels, jax.nn.silu(gate) * up, weights["down"], weights.get("down_bias"))
