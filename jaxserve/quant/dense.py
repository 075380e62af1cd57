"""F32, F16 and BF16: one plain array, the formats that are not quantized."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32

from jaxserve.quant.quantized import Format, Leaf

FORMAT_OF_DTYPE = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Dense:
    """array float32, float16 or bfloat16 [O, I]."""

    array: Leaf

    @property
    def format(self) -> str:
        return FORMAT_OF_DTYPE[str(self.array.dtype)]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    def decode(self) -> Float32[Array, "... O I"]:
        return jnp.asarray(self.array).astype(jnp.float32)


def _format(name: str, dtype: Any) -> Format:
    def encode(matrix: np.ndarray) -> Dense:
        return Dense(array=np.asarray(matrix, np.float32).astype(dtype))

    def from_gguf_bytes(raw: np.ndarray, shape: tuple[int, ...]) -> Dense:
        return Dense(array=np.require(raw.view(dtype).reshape(shape), requirements="A"))

    def spec(num_outputs: int, num_inputs: int) -> Dense:
        return Dense(array=jax.ShapeDtypeStruct((num_outputs, num_inputs), dtype))

    return Format(name=name, block_length=1, encode=encode, from_gguf_bytes=from_gguf_bytes, spec=spec)


F32 = _format("F32", jnp.float32)
F16 = _format("F16", jnp.float16)
BF16 = _format("BF16", jnp.bfloat16)
