"""What every weight format offers, and the operations that are the same for all: decode, matmul, gather of rows.

A weight is a matrix stored [O, I], outputs by inputs, as in the files. It is a frozen pytree whose arrays stay packed
on the device. `matmul` here is the definition; a kernel may compute the same faster.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Integer

from pallas_kernels.quantized_matmul.reference import quantized_matmul

# A leaf of a weight: a jax or numpy array, a tracer, or a jax.ShapeDtypeStruct in a spec. Not checked when a weight is
# built, because jax rebuilds pytrees with placeholders of its own.
Leaf = Any


@runtime_checkable
class Weight(Protocol):
    """A matrix [O, I] in some format; leading axes (experts) are allowed. Implementations are registered pytrees."""

    @property
    def format(self) -> str:
        """The name in `formats.FORMATS`, or one that only `schemes` read."""
        ...

    @property
    def shape(self) -> tuple[int, ...]:
        """The logical shape, [O, I]."""
        ...

    def decode(self) -> Float32[Array, "... O I"]:
        """The matrix in float32; each value exactly what the format defines."""
        ...


@dataclass(frozen=True, kw_only=True)
class Format:
    """How to make weights of one format; the weights themselves know how to decode.

    `encode(matrix)` rounds a float32 matrix as llama.cpp's reference does, on the host.
    `from_gguf_bytes(raw, shape)` regroups a GGUF tensor's bytes [O, bytes_per_row] into the weight's arrays, on the
    host and without expanding a value.
    `spec(num_outputs, num_inputs)` is the weight with a jax.ShapeDtypeStruct for each array.
    """

    name: str
    block_length: int
    encode: Callable[[np.ndarray], Weight]
    from_gguf_bytes: Callable[[np.ndarray, tuple[int, ...]], Weight]
    spec: Callable[[int, int], Weight]


def decode(weight: Weight) -> Float32[Array, "... O I"]:
    """The matrix in float32. Can be jitted."""
    return weight.decode()


def matmul(x: Float[Array, "T I"], weight: Weight) -> Float32[Array, "T O"]:
    """x @ decode(weight).T by the kernel's definition; what every faster kernel has to equal."""
    return quantized_matmul(x, weight)


def take_rows[W: Weight](weight: W, rows: Integer[Array | np.ndarray, "R"]) -> W:
    """The weight with only these outputs, in this order, still packed. Stays on the host if its arrays are there."""
    if isinstance(weight, _HasInputOrder):
        return weight.take_rows(rows)
    leading = (slice(None),) * (len(weight.shape) - 2)
    return jax.tree.map(lambda array: array[(*leading, rows)], weight)


def stacked[W: Weight](weights: Sequence[W]) -> W:
    """Weights of one format and shape as one, on a new leading axis; on the host."""
    return jax.tree.map(lambda *arrays: np.stack(arrays), *weights)


def with_leading_axes[W: Weight](weight: W, shape: tuple[int, ...]) -> W:
    """A weight [A * B, I] as [A, B, I], still packed: its outputs in blocks of B."""
    if weight.shape == shape:
        return weight
    if isinstance(weight, _HasInputOrder):
        return weight.with_leading_axes(shape)
    return jax.tree.map(lambda array: array.reshape(*shape[:-1], *array.shape[len(weight.shape) - 1 :]), weight)


@runtime_checkable
class _HasInputOrder(Protocol):
    """A weight with an array that belongs to all its outputs."""

    def take_rows(self, rows: Integer[Array | np.ndarray, "R"]) -> Any: ...

    def with_leading_axes(self, shape: tuple[int, ...]) -> Any: ...


def embedding_rows(weight: Weight, ids: Integer[Array, "T"]) -> Float32[Array, "T I"]:
    """The rows of an embedding table [V, I] for these token ids; only they are decoded."""
    return decode(take_rows(jax.tree.map(jnp.asarray, weight), ids))


def num_bytes(weight: Weight) -> int:
    """Bytes of the packed arrays; of a spec, the bytes they would take."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(weight))
