"""The formats this version computes with, by the name that files give them, and the weight of a tensor from a file."""

from checkpoints.errors import UnsupportedCheckpoint
from checkpoints.tensors import HostTensor
from jaxserve.quant import dense, iq4, mxfp4, q2_k, q4, q4_k, q5, q6_k, q8
from jaxserve.quant.quantized import Format, Weight

FORMATS: dict[str, Format] = {
    "F32": dense.F32,
    "F16": dense.F16,
    "BF16": dense.BF16,
    "Q4_0": q4.Q4_0,
    "Q4_1": q4.Q4_1,
    "Q5_0": q5.Q5_0,
    "Q5_1": q5.Q5_1,
    "Q8_0": q8.Q8_0,
    "Q2_K": q2_k.Q2_K,
    "Q3_K": q2_k.Q3_K,
    "Q4_K": q4_k.Q4_K,
    "Q5_K": q4_k.Q5_K,
    "Q6_K": q6_k.Q6_K,
    "IQ4_NL": iq4.IQ4_NL,
    "IQ4_XS": iq4.IQ4_XS,
    "MXFP4": mxfp4.MXFP4,
}


def format_named(name: str, *, wanted_by: str) -> Format:
    """The format of this name. UnsupportedCheckpoint, naming who wants it, where this version has none."""
    if name in FORMATS:
        return FORMATS[name]
    raise UnsupportedCheckpoint(
        f"{wanted_by} is stored as {name}; this version computes with {', '.join(FORMATS)}: use a file in one of these"
    )


def weight_from_tensor(tensor: HostTensor) -> Weight:
    """A file's matrix [O, I] as a weight in the same format, its arrays on the host."""
    tensor_format = format_named(tensor.format, wanted_by=f"tensor {tensor.name!r}")
    if tensor_format.block_length == 1:
        return dense.Dense(array=tensor.data)
    return tensor_format.from_gguf_bytes(tensor.data, tensor.shape)
