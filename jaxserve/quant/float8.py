"""F8_E4M3 and F8_E5M2: floats of 8 bits with scales, one for each output and run of inputs.

Values: q * scale, rounded once to float32. Scales of a whole matrix or of blocks of outputs are repeated for each
output, so that outputs can be taken apart; that is at most a 32nd of the quants' bytes for blocks of 128 inputs.
"""

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32

from jaxserve.quant.grouped_int import for_inputs
from jaxserve.quant.quantized import Leaf

FORMAT_OF_DTYPE = {"float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2"}


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Float8:
    """quants float8 [O, I]; scale float [O, runs], for `run_length` inputs each, the last one perhaps fewer."""

    quants: Leaf
    scale: Leaf
    run_length: int = field(metadata={"static": True})

    @property
    def format(self) -> str:
        return FORMAT_OF_DTYPE[str(self.quants.dtype)]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.quants.shape

    def decode(self) -> Float32[Array, "... O I"]:
        scale = jnp.asarray(self.scale).astype(jnp.float32)
        return jnp.asarray(self.quants).astype(jnp.float32) * for_inputs(scale, self.run_length, self.shape[-1])
