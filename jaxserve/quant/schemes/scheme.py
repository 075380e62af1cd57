"""What a scheme of quantized checkpoints offers, and how its tensors are read: nothing is believed unchecked.

A scheme goes by the file: a matrix is quantized where the file has the scheme's tensors for it, and is not where it has
a plain `weight`, whatever the lists of exceptions in the configuration say.
"""

from collections.abc import Collection
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Shaped

from checkpoints.errors import CheckpointError
from checkpoints.load import WeightSource
from jaxserve.quant.quantized import Weight

FLOATS = ("F16", "BF16", "F32")
# Scales of quantized caches, of which this version makes no use; they lie beside a layer's projections.
_CACHE_SCALES = ("k_scale", "v_scale", "kv_scale", "q_scale", "prob_scale")


@runtime_checkable
class Scheme(Protocol):
    """Which tensors of a file hold a matrix, and the packed weight made of them.

    Matrices go by the name they would have unquantized: "model.layers.0.self_attn.q_proj.weight", or without ".weight"
    where the model has a bare parameter ("model.layers.0.mlp.experts.gate_up_proj"). Shapes are logical: [O, I], or
    [E, O, I] for experts in one tensor.
    """

    @property
    def name(self) -> str: ...

    @property
    def notes(self) -> tuple[str, ...]:
        """What the configuration asks for and this version does otherwise, a line each."""
        ...

    def tensors(self, name: str, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]] | None:
        """The file's tensors that hold this matrix and must be there, with their shapes; None: it is not quantized."""
        ...

    def optional(self, name: str, shape: tuple[int, ...]) -> set[str]:
        """Tensors that may be there as well, of any shape: `read` checks those it uses, `check_unread` the others."""
        ...

    def format_of(self, source: WeightSource, name: str) -> str:
        """The format of the weight that `read` would give, for a matrix that has `tensors`."""
        ...

    def read(self, source: WeightSource, name: str, shape: tuple[int, ...]) -> Weight:
        """The packed weight on the host. Raises CheckpointError where the tensors are not what `tensors` says."""
        ...


def check_unread(source: WeightSource, names: Collection[str]) -> None:
    """Raises CheckpointError if one of these, which nothing reads, would have changed the result.

    For the optional tensors that the model has no place for: a bias (some programs write one of zeros for each matrix)
    or a zero point.
    """
    for name in names:
        if name.endswith((".bias", ".weight_zero_point")) and np.any(source.read(name).data):
            raise CheckpointError(f"{source.path}: tensor {name!r} is not zero, and the model has no place for it")


def module_of(name: str) -> str:
    """The name of the module whose weight this is."""
    return name.removesuffix(".weight")


def unread_beside(module: str) -> set[str]:
    """Tensors of any scheme that are not used: a bias of zeros, scales of activations and of the cache."""
    own = {f"{module}.{leaf}" for leaf in ("bias", "input_scale", "output_scale", "input_zero_point")}
    own |= {f"{module}.{leaf}" for leaf in ("input_global_scale", "activation_scale", "k_scale", "v_scale")}
    return own | {f"{module.rpartition('.')[0]}.{leaf}" for leaf in _CACHE_SCALES}


def read_part(
    source: WeightSource, name: str, shape: tuple[int, ...], formats: tuple[str, ...]
) -> Shaped[np.ndarray, "..."]:
    """One tensor, of exactly this shape and one of these formats. Raises CheckpointError."""
    found = source.info(name)
    if found.format not in formats or found.shape != shape:
        raise CheckpointError(
            f"{source.path}: tensor {name!r} is {found.format} {list(found.shape)}; "
            f"the quantization of this matrix needs {' or '.join(formats)} {list(shape)}"
        )
    return source.read(name).data


def read_number(source: WeightSource, name: str, formats: tuple[str, ...] = ("F32",)) -> Shaped[np.ndarray, ""]:
    """A tensor with a single value. Raises CheckpointError."""
    found = source.info(name)
    if found.format not in formats or found.num_elements != 1:
        raise CheckpointError(
            f"{source.path}: tensor {name!r} is {found.format} {list(found.shape)}; "
            f"the quantization of this matrix needs one value in {' or '.join(formats)}"
        )
    return source.read(name).data.reshape(())


def blocks_in(length: int, block_length: int) -> int:
    """Blocks that hold this many values, the last one perhaps not full."""
    return -(-length // block_length)
