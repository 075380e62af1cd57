"""Q6_K: super-blocks of 16 sub-blocks of 16 values, each with an 8-bit signed scale.

Values: d * scale * (q - 32), q of 6 bits. Decoding agrees bit for bit with ggml-quants.c (dequantize_row_q6_K);
encoding takes scales from the extremes, where llama.cpp searches.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32

from jaxserve.quant import blocks, super_blocks
from jaxserve.quant.quantized import Format, Leaf


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Q6_KWeight:  # noqa: N801 - the format's own name
    """low uint8 [O, I/2], high uint8 [O, I/4], scales int8 [O, I/16], d float16 [O, I/256].

    Of 128 values, the low four bits lie in 64 bytes (values 0 to 63 in the low nibbles) and the high two in 32 bytes
    (values 0 to 31 in the lowest bits).
    """

    low: Leaf
    high: Leaf
    scales: Leaf
    d: Leaf

    @property
    def format(self) -> str:
        return "Q6_K"

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.low.shape[:-1], self.low.shape[-1] * 2)

    def decode(self) -> Float32[Array, "... O I"]:
        low = super_blocks.unpack_fields(jnp.asarray(self.low), 4, 64)
        high = super_blocks.unpack_fields(jnp.asarray(self.high), 2, 32)
        quants = (low | high << jnp.uint8(4)).astype(jnp.float32) - 32
        scale = super_blocks.sub_block_scales(jnp.asarray(self.d), jnp.asarray(self.scales))
        return super_blocks.scaled(quants, scale)


def _encode(matrix: np.ndarray) -> Q6_KWeight:
    values = super_blocks.as_sub_blocks(matrix, 16)
    wanted = blocks.signed_extreme(values)[..., 0] / np.float32(-32)
    d, scales, scale = super_blocks.rounded_scales(wanted, 16, -128)
    quants = (super_blocks.rounded_quants(values, scale, -32, 31) + 32).astype(np.uint8).reshape(np.shape(matrix))
    return Q6_KWeight(
        low=super_blocks.pack_fields(quants, 4, 64),
        high=super_blocks.pack_fields(quants >> 4, 2, 32),
        scales=scales,
        d=d,
    )


def _from_gguf_bytes(raw: np.ndarray, shape: tuple[int, ...]) -> Q6_KWeight:
    low, high, scales, d = blocks.split_blocks(raw, shape, (128, 64, 16, 2), super_blocks.SUPER_BLOCK_LENGTH)
    return Q6_KWeight(low=low, high=high, scales=scales.view(np.int8), d=d.view(np.float16))


def _spec(num_outputs: int, num_inputs: int) -> Q6_KWeight:
    return Q6_KWeight(
        low=super_blocks.packed_struct(num_outputs, num_inputs, 2, jnp.uint8),
        high=super_blocks.packed_struct(num_outputs, num_inputs, 4, jnp.uint8),
        scales=super_blocks.packed_struct(num_outputs, num_inputs, 16, jnp.int8),
        d=super_blocks.packed_struct(num_outputs, num_inputs, 256, jnp.float16),
    )


Q6_K = Format(
    name="Q6_K",
    block_length=super_blocks.SUPER_BLOCK_LENGTH,
    encode=_encode,
    from_gguf_bytes=_from_gguf_bytes,
    spec=_spec,
)
