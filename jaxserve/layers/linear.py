"""Matrix products with a weight in whatever format it is kept."""

from jaxtyping import Array, Float

from jaxserve.quant.quantized import Weight
from pallas_kernels.kernels import Kernels


def linear(
    kernels: Kernels, x: Float[Array, "T I"], weight: Weight, bias: Float[Array, "O"] | None = None
) -> Float[Array, "T O"]:
    """x @ weight.T (+ bias) in x's dtype, accumulated in float32. Weights are [out, in], as files have them."""
    out = kernels.quantized_matmul(x, weight)
    if bias is not None:
        out = out + bias
    return out.astype(x.dtype)
