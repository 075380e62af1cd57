"""INT2, INT3, INT4 and INT8: whole numbers with a scale for each group of inputs, and a zero that is chosen or halfway.

Values: scale * (q - zero). What GPTQ, AWQ and compressed-tensors store, brought to one layout, so that one kernel can
read them all. Differences of 9 bits times a float16 or bfloat16 are exact in float32, and a float32 scale is rounded
once.
"""

import dataclasses
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, Integer, Num, Shaped, UInt8

from jaxserve.quant import bit_streams
from jaxserve.quant.quantized import Leaf


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class GroupedInt:
    """quants uint8 [O, I * bits / 8], a stream of bits a row; scale float and zero uint8 or uint16 [O, groups].

    Without `zero` it is 2^(bits - 1). Groups are `group_length` inputs each, the last one perhaps fewer. With
    `input_order` int32 [I] the inputs are stored in another order, group by group: the k-th is input_order[k]. It
    belongs to all outputs, hence `take_rows`; stacked weights have one each.
    """

    quants: Leaf
    scale: Leaf
    zero: Leaf = None
    input_order: Leaf = None
    bits: int = field(metadata={"static": True})
    group_length: int = field(metadata={"static": True})

    @property
    def format(self) -> str:
        return f"INT{self.bits}"

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.quants.shape[:-1], self.quants.shape[-1] * 8 // self.bits)

    def decode(self) -> Float32[Array, "... O I"]:
        quants = bit_streams.unpack(jnp.asarray(self.quants), self.bits).astype(jnp.float32)
        scale = for_inputs(jnp.asarray(self.scale).astype(jnp.float32), self.group_length, quants.shape[-1])
        values = (quants - self._zeros(quants.shape[-1])) * scale
        if self.input_order is None:
            return values
        position = jnp.argsort(jnp.asarray(self.input_order), axis=-1)
        return jnp.take_along_axis(values, position[..., None, :], axis=-1)

    def take_rows(self, rows: Integer[Array | np.ndarray, "R"]) -> "GroupedInt":
        """Only these outputs, in this order."""
        leading = (slice(None),) * (len(self.shape) - 2)
        taken = jax.tree.map(lambda array: array[(*leading, rows)], dataclasses.replace(self, input_order=None))
        return dataclasses.replace(taken, input_order=self.input_order)

    def with_leading_axes(self, shape: tuple[int, ...]) -> "GroupedInt":
        """[A * B, I] as [A, B, I]: the outputs in blocks of B, each with the order of the inputs."""
        num_leading = len(self.shape) - 1
        blocks = jax.tree.map(
            lambda array: array.reshape(*shape[:-1], *array.shape[num_leading:]),
            dataclasses.replace(self, input_order=None),
        )
        if self.input_order is None:
            return blocks
        order = np.broadcast_to(self.input_order, (*shape[:-2], shape[-1]))
        return dataclasses.replace(blocks, input_order=order)

    def _zeros(self, num_inputs: int) -> Float32[Array, "..."]:
        if self.zero is None:
            return jnp.float32(2 ** (self.bits - 1))
        return for_inputs(jnp.asarray(self.zero).astype(jnp.float32), self.group_length, num_inputs)


def for_inputs(per_group: Num[Array, "... groups"], group_length: int, num_inputs: int) -> Num[Array, "... I"]:
    """The number of its group for each input."""
    return jnp.repeat(per_group, group_length, axis=-1)[..., :num_inputs]


def in_group_order(
    quants: UInt8[np.ndarray, "O bytes"], bits: int, group_of_input: Integer[np.ndarray, " I"]
) -> tuple[UInt8[np.ndarray, "O bytes"], Integer[np.ndarray, " I"]]:
    """The quants with the inputs of each group side by side, on the host, and `input_order`."""
    order = np.argsort(group_of_input, kind="stable").astype(np.int32)
    values = bit_streams.unpack_on_host(quants, bits)
    return bit_streams.pack_on_host(np.ascontiguousarray(values[:, order]), bits), order


def has_tiles(weight: GroupedInt) -> bool:
    """Whether the CPU kernel has these numbers exactly: 4 bits in groups of whole blocks with scales that fit float16,
    or 8 bits with one scale a row and the zero halfway. Looks at the values, where there are some."""
    num_groups = weight.scale.shape[-1]
    if weight.input_order is not None:
        return False
    if weight.bits == 4:
        return (num_groups == 1 or weight.group_length % 32 == 0) and _fits_float16(weight.scale)
    return weight.bits == 8 and num_groups == 1 and (weight.zero is None or _all_equal(weight.zero, 128))


def tile_parts(weight: GroupedInt) -> tuple[dict[str, Shaped[np.ndarray, "..."]], int | None]:
    """The arrays and the group length that the CPU kernel's tiles are made of. ValueError unless `has_tiles`."""
    if not has_tiles(weight):
        raise ValueError(f"the CPU kernel does not take the scales or zeros of this {weight.format} weight")
    quants, scale = np.asarray(weight.quants), np.asarray(weight.scale)
    if weight.bits == 8:
        return {"quants": (quants ^ np.uint8(128)).view(np.int8), "scale": scale[..., 0]}, None
    zero = np.full(scale.shape, 8, np.uint8) if weight.zero is None else np.asarray(weight.zero)
    parts = {"quants": bit_streams.unpack_on_host(quants, 4), "scale": scale.astype(np.float16), "zero": zero}
    return parts, weight.group_length if scale.shape[-1] > 1 else None


def _fits_float16(scale: Leaf) -> bool:
    if scale.dtype == np.float16 or isinstance(scale, jax.ShapeDtypeStruct):
        return scale.dtype != np.float32
    wide = np.asarray(scale).astype(np.float32)
    with np.errstate(over="ignore"):
        return bool((wide.astype(np.float16).astype(np.float32) == wide).all())


def _all_equal(zero: Leaf, value: int) -> bool:
    return not isinstance(zero, jax.ShapeDtypeStruct) and bool((np.asarray(zero) == value).all())
