"""Feed-forward layers."""

from jaxtyping import Array, Float

from jaxserve.layers.linear import gathered, side_by_side
from pallas_kernels.kernels import Kernels
from pallas_kernels.quantized_matmul.around import Activation, Before, GatedUnit


def gated_mlp(
    kernels: Kernels,
    x: Float[Array, "T D"],
    weights: dict,
    *,
    before: Before = None,
    activation: Activation = "silu",
    residual: Float[Array, "T D"] | None = None,
) -> Float[Array, "T D"]:
    """down(activation(gate(h)) * up(h)) (+ residual) for h = before(x) (Shazeer 2020, arXiv 2002.05202); biases where
    `weights` has them."""
    gate_up = side_by_side(kernels, x, weights, ("gate", "up"), before=before)
    unit = GatedUnit(activation=activation)
    return gathered(kernels, gate_up, weights["down"], weights.get("down_bias"), before=unit, residual=residual)
