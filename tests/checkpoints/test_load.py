"""One interface over both containers."""

import shutil
import struct
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from checkpoints.errors import CheckpointError, UnsupportedCheckpoint
from checkpoints.load import GGUFWeights, SafetensorsWeights, open_weights

FIXTURES = Path(__file__).parents[1] / "fixtures"
LEGACY = FIXTURES / "gguf" / "gguf_llama_legacy" / "model.gguf"
SHARDED = FIXTURES / "models" / "llama_bf16_sharded"


def test_gguf_gives_blocks_as_rows_and_plain_formats_as_numbers() -> None:
    with open_weights(LEGACY) as source:
        assert isinstance(source, GGUFWeights)
        assert source.metadata["general.architecture"] == "llama"
        tensors = {source.info(name).format: source.read(name) for name in source.names()}
    assert set(tensors) == {"F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"}
    for name, dtype in (("F32", np.float32), ("F16", np.float16), ("BF16", ml_dtypes.bfloat16)):
        assert (tensors[name].data.dtype, tensors[name].data.shape) == (dtype, tensors[name].shape)
    assert tensors["Q4_1"].data.dtype == np.uint8
    assert tensors["Q4_1"].data.shape == (tensors["Q4_1"].shape[0], tensors["Q4_1"].shape[1] // 32 * 20)


def test_safetensors_give_numbers() -> None:
    with open_weights(SHARDED) as source:
        assert isinstance(source, SafetensorsWeights)
        assert source.metadata == {}
        tensor = source.read("lm_head.weight")
    assert (tensor.format, tensor.shape, tensor.data.dtype) == ("BF16", (256, 64), ml_dtypes.bfloat16)


def test_a_gguf_is_known_by_its_first_bytes_too(tmp_path: Path) -> None:
    shutil.copyfile(LEGACY, tmp_path / "blob")
    with open_weights(tmp_path / "blob") as source:
        assert isinstance(source, GGUFWeights)


def test_errors_name_what_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nothing: does not exist"):
        open_weights(tmp_path / "nothing")
    with open_weights(SHARDED) as source, pytest.raises(CheckpointError, match="has no tensor 'x'"):
        source.read("x")
    key = b"split.count"
    content = struct.pack("<4sIQQQ", b"GGUF", 3, 0, 1, len(key)) + key + struct.pack("<IH", 2, 4)
    (tmp_path / "part.gguf").write_bytes(content)
    with pytest.raises(UnsupportedCheckpoint, match="one of 4 parts of a split GGUF"):
        open_weights(tmp_path / "part.gguf")
