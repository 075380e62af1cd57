"""Writes a sentencepiece model file in memory from a vocabulary with scores and token types.

Only the fields that encoding needs, in protocol buffer wire format (sentencepiece_model.proto): sentencepiece's own
generated classes would bring in the protobuf package for a dozen lines of encoding.
"""

import struct
from collections.abc import Sequence

BPE_MODEL_TYPE = 2


def model_bytes(
    pieces: Sequence[str], scores: Sequence[float], types: Sequence[int], *, byte_fallback: bool, space_prefix: bool
) -> bytes:
    """A serialized ModelProto. types are sentencepiece's, which GGUF took over (1 normal ... 6 byte).

    Text is not normalized (the models in question use the identity) except for the leading space of space_prefix.
    """
    out = [
        _field(1, _field(1, piece.encode()) + _float(2, score) + _varint_field(3, kind))
        for piece, score, kind in zip(pieces, scores, types, strict=True)
    ]
    # TrainerSpec: model_type, byte_fallback, and no ids for bos, eos and pad, which are never asked for by role.
    trainer = _varint_field(3, BPE_MODEL_TYPE) + _varint_field(35, int(byte_fallback))
    trainer += _varint_field(40, types.index(2))
    trainer += b"".join(_varint_field(number, -1) for number in (41, 42, 43))
    # NormalizerSpec: name, add_dummy_prefix, remove_extra_whitespaces, escape_whitespaces.
    normalizer = _field(1, b"identity") + _varint_field(3, int(space_prefix)) + _varint_field(4, 0)
    normalizer += _varint_field(5, 1)
    return b"".join([*out, _field(2, trainer), _field(3, normalizer)])


def _varint(value: int) -> bytes:
    value &= 2**64 - 1  # negative numbers are ten bytes of two's complement
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _varint_field(number: int, value: int) -> bytes:
    return _varint(number << 3) + _varint(value)


def _field(number: int, payload: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(payload)) + payload


def _float(number: int, value: float) -> bytes:
    return _varint(number << 3 | 5) + struct.pack("<f", value)
