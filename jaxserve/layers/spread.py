"""Sums over the devices a model is spread over. On one device these functions give back what they got.

Heads, widths and the vocabulary are cut over the mesh axis "tensor", experts over "expert" and, where groups with
requests of their own share them, over "data" (sharding/plan.py).
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


def size(kernels: Kernels, axis: str) -> int:
    """The number of devices along a mesh axis."""
    return lax.axis_size(axis) if axis in kernels.spread_over else 1


def joined(kernels: Kernels, x: Array, axis_name: str, axis: int) -> Array:
    """The parts of all devices along a mesh axis, one behind the other along an axis of the array."""
    return lax.all_gather(x, axis_name, axis=axis, tiled=True) if axis_name in kernels.spread_over else x


def own_total(kernels: Kernels, x: Array, axis_name: str) -> Array:
    """Of the sum of all devices' x along a mesh axis, this device's rows: the inverse of `joined` for sums."""
    if axis_name not in kernels.spread_over:
        return x
    return lax.psum_scatter(x, axis_name, scatter_dimension=0, tiled=True)
