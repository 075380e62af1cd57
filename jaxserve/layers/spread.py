"""Sums over the devices a model is spread over. On one device these functions give back what they got.

Heads, widths and the vocabulary are cut over the mesh axis "tensor", experts over "expert" (sharding/plan.py).
"""

from jax import lax
from jaxtyping import Array, Int32

from pallas_kernels.kernels import Kernels


def total(kernels: Kernels, x: Array, *axes: str) -> Array:
    """The sum of all devices' x along those mesh axes."""
    names = tuple(axis for axis in axes if axis in kernels.spread_over)
    return lax.psum(x, names) if names else x


def place(kernels: Kernels, axis: str) -> int | Int32[Array, ""]:
    """The number of this device along a mesh axis."""
    return lax.axis_index(axis) if axis in kernels.spread_over else 0
