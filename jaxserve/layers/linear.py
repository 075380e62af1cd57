"""Matrix products with weights in whatever format they are kept."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxserve.layers.spread import total
from jaxserve.quant.quantized import Weight
from pallas_kernels.kernels import Kernels
from pallas_kernels.quantized_matmul.around import Before

# Weights whose products with the same activations stand side by side, in the order of their columns.
NEIGHBOURS = (("q", "k", "v"), ("gate", "up"))


def linear(
    kernels: Kernels,
    x: Float[Array, "T X"],
    weight: Weight,
    bias: Float[Array, "O"] | None = None,
    *,
    before: Before = None,
    residual: Float[Array, "T O"] | None = None,
) -> Float[Array, "T O"]:
    """before(x) @ weight.T (+ residual) (+ bias) in x's dtype, accumulated in float32. Weights are [out, in]."""
    out = kernels.quantized_matmul(x, weight, before=before, residual=residual)
    if bias is not None:
        out = out + bias
    return out.astype(x.dtype)


def gathered(
    kernels: Kernels,
    x: Float[Array, "T X"],
    weight: Weight,
    bias: Float[Array, "O"] | None = None,
    *,
    before: Before = None,
    residual: Float[Array, "T O"] | None = None,
) -> Float[Array, "T O"]:
    """As `linear`, for a weight whose inputs are spread over devices: their partial sums are added up first, in
    float32."""
    if "tensor" not in kernels.spread_over:
        return linear(kernels, x, weight, bias, before=before, residual=residual)
    out = total(kernels, kernels.quantized_matmul(x, weight, before=before).astype(jnp.float32), "tensor")
    for term in (residual, bias):
        out = out if term is None else out + term
    return out.astype(x.dtype)


def side_by_side(
    kernels: Kernels, x: Float[Array, "T X"], weights: Mapping[str, Any], names: Sequence[str], *, before: Before = None
) -> Float[Array, "T O"]:
    """The products with several weights, one beside the other: x @ [a; b; c].T (+ their biases).

    Neighbours may be kept joined, as one weight under their names with "+" between (see quant/tiled.py).
    """
    outs = []
    for run in _kept_runs(weights, names):
        biases = [weights[f"{name}_bias"] for name in run if f"{name}_bias" in weights]
        bias = jnp.concatenate(biases) if biases else None
        outs.append(linear(kernels, x, weights["+".join(run)], bias, before=before))
    return jnp.concatenate(outs, axis=-1) if len(outs) > 1 else outs[0]


def _kept_runs(weights: Mapping[str, Any], names: Sequence[str]) -> list[Sequence[str]]:
    """The names in order, cut into runs that `weights` keeps as one."""
    runs, start = [], 0
    while start < len(names):
        end = next(e for e in range(len(names), start, -1) if "+".join(names[start:e]) in weights)
        runs.append(names[start:end])
        start = end
    return runs
