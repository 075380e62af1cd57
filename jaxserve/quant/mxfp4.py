"""MXFP4: blocks of 32 four-bit floats (E2M1) with a power of two as scale.

Values: 2^(exponent - 128) * DOUBLED[q] (OCP Microscaling Formats v1.0, sections 5.2 and 5.3; the table holds twice the
floats, so the scale is halved). In GGUF's order of nibbles. Agrees bit for bit with ggml (dequantize_row_mxfp4,
quantize_row_mxfp4_ref), but where a value or a scale is below 2^-126, which XLA on CPU takes for 0.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float32, UInt8

from jaxserve.quant import blocks, super_blocks
from jaxserve.quant.quantized import Format, Leaf

DOUBLED = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class MXFP4Weight:
    """quants uint8 [O, I/2] (two values a byte, see `blocks`), exponents uint8 [O, I/32]."""

    quants: Leaf
    exponents: Leaf

    @property
    def format(self) -> str:
        return "MXFP4"

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.quants.shape[:-1], self.quants.shape[-1] * 2)

    def decode(self) -> Float32[Array, "... O I"]:
        levels = jnp.asarray(DOUBLED, jnp.float32)[super_blocks.unpack_fields(jnp.asarray(self.quants), 4, 16)]
        exponents = jnp.asarray(self.exponents).astype(jnp.uint32)
        normal = (exponents - jnp.uint32(1)) << jnp.uint32(23)
        bits = jnp.where(exponents < 2, jnp.uint32(1 << 21) << exponents, normal)  # 2^-128 and 2^-127 are subnormal
        return super_blocks.scaled(levels, lax.bitcast_convert_type(bits, jnp.float32))


def _scale(exponents: UInt8[np.ndarray, "*rows blocks"]) -> Float32[np.ndarray, "*rows blocks"]:
    return np.ldexp(np.float32(1), exponents.astype(np.int32) - 128)


def _encode(matrix: np.ndarray) -> MXFP4Weight:
    values = blocks.as_blocks(matrix)
    largest = np.abs(values).max(axis=-1)
    whole = np.floor(np.log2(largest, out=np.zeros_like(largest), where=largest > 0))
    exponents = np.where(largest > 0, np.maximum(whole + 125, 0), 0).astype(np.uint8)
    quants = blocks.nearest_levels(values, _scale(exponents), DOUBLED)
    return MXFP4Weight(quants=blocks.pack_nibbles(quants), exponents=exponents)


def _from_gguf_bytes(raw: np.ndarray, shape: tuple[int, ...]) -> MXFP4Weight:
    exponents, quants = blocks.split_blocks(raw, shape, (1, 16))
    return MXFP4Weight(quants=quants, exponents=exponents)


def _spec(num_outputs: int, num_inputs: int) -> MXFP4Weight:
    return MXFP4Weight(
        quants=blocks.packed_struct(num_outputs, num_inputs, 2, jnp.uint8),
        exponents=blocks.packed_struct(num_outputs, num_inputs, 32, jnp.uint8),
    )


MXFP4 = Format(
    name="MXFP4", block_length=blocks.BLOCK_LENGTH, encode=_encode, from_gguf_bytes=_from_gguf_bytes, spec=_spec
)
