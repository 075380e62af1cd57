"""One file, shards with an index, and what a hostile header or index may try."""

import json
import struct
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from checkpoints.errors import CheckpointError, UnsupportedCheckpoint
from checkpoints.safetensors import INDEX_NAME, open_safetensors

MODELS = Path(__file__).parents[1] / "fixtures" / "models"


def with_header(path: Path, header: Any, data: bytes = bytes(64), num_bytes: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if num_bytes is None else num_bytes) + text + data)
    return path


def entry(shape: list[int], start: int, end: int, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


@pytest.mark.parametrize("name", ["llama_untied", "llama_tied_bias_llama3", "llama_yarn", "llama_linear"])
def test_a_single_file_agrees_with_the_library(name: str) -> None:
    expected = load_file(MODELS / name / "model.safetensors")
    with open_safetensors(MODELS / name) as files:
        assert set(files.tensors) == set(expected)
        for tensor_name, values in expected.items():
            assert files.tensors[tensor_name].shape == values.shape
            np.testing.assert_array_equal(files.read(tensor_name), values)


def test_bfloat16_shards_are_read_through_the_index() -> None:
    with open_safetensors(MODELS / "llama_bf16_sharded") as files:
        index = json.loads((MODELS / "llama_bf16_sharded" / INDEX_NAME).read_text())
        assert set(files.tensors) == set(index["weight_map"])
        assert len(files.paths) == 2
        embedding = files.read("model.embed_tokens.weight")
        total = sum(files.read(name).nbytes for name in files.tensors)
    assert embedding.dtype == ml_dtypes.bfloat16
    assert embedding.shape == (256, 64)
    assert 0.1 < float(np.std(embedding.astype(np.float32))) < 10
    assert total == index["metadata"]["total_size"]


def test_every_plain_dtype_and_an_unaligned_one(tmp_path: Path) -> None:
    arrays = {
        "b": np.array([True, False, True]),
        "f2": np.arange(3, dtype=np.float16),
        "f8": np.arange(2, dtype=np.float64),
        "scalar": np.array(2.5, np.float32),
        "i": np.arange(-2, 2, dtype=np.int64).reshape(2, 2),
    }
    save_file(arrays, tmp_path / "weights.safetensors")
    with open_safetensors(tmp_path) as files:
        for name, values in arrays.items():
            np.testing.assert_array_equal(files.read(name), values)
    path = with_header(tmp_path / "odd.safetensors", {"a": entry([2], 1, 9)}, b"\0" + struct.pack("<2f", 1, 2))
    with open_safetensors(path) as files:
        assert files.read("a").flags.aligned
        assert files.read("a").tolist() == [1, 2]


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b"{", "header: is no JSON"),
        (b"[" * 100_000, "header: is no JSON"),
        (b"\xff\xfe", "header: is no JSON"),
        (b"[]", "header: is no JSON object"),
        (b'{"a": 1, "a": 2}', "header: .*a key occurs twice"),
        ({"a": 3}, "'a': expected a table"),
        ({"a": {}}, "'a': dtype: None"),
        ({"a": {"dtype": "F32"}}, "'a': shape"),
        ({"a": entry([-1], 0, 4)}, "'a': shape"),
        ({"a": entry([True], 0, 4)}, "'a': shape"),
        ({"a": entry([1] * 9, 0, 4)}, "'a': shape"),
        ({"a": entry([1 << 62, 1 << 62], 0, 64)}, "'a': F32 .* needs"),
        ({"a": entry([4], 0, 12)}, "'a': F32 .* needs 16 bytes, the header gives 12"),
        ({"a": entry([4], 56, 72)}, "'a': data_offsets: .* leaves the file"),
        ({"a": entry([4], 16, 0)}, "'a': data_offsets"),
        ({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0]}}, "'a': data_offsets"),
        ({"a": entry([4], 0, 16), "b": entry([4], 12, 28)}, "'b': its bytes overlap those of tensor 'a'"),
    ],
)
def test_a_damaged_header_is_refused(header: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=message):
        open_safetensors(with_header(tmp_path / "model.safetensors", header))


@pytest.mark.parametrize("num_bytes", [1 << 20, 1 << 63, (1 << 64) - 1])
def test_a_header_longer_than_the_file_is_refused(num_bytes: int, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="header length"):
        open_safetensors(with_header(tmp_path / "model.safetensors", {}, num_bytes=num_bytes))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth", "model.pt"])
def test_a_pickle_is_never_read(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b"cos\nsystem\n(S'exit 1'\ntR.")
    for path in (tmp_path, tmp_path / name):
        with pytest.raises(UnsupportedCheckpoint, match=f"{name}: a pickle, which may run any code"):
            open_safetensors(path)


def test_short_missing_and_unknown(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    with pytest.raises(CheckpointError, match="no safetensors file"):
        open_safetensors(tmp_path)
    path.write_bytes(b"")
    with pytest.raises(CheckpointError, match="empty"):
        open_safetensors(path)
    path.write_bytes(b"1234")
    with pytest.raises(CheckpointError, match="header length"):
        open_safetensors(path)
    with pytest.raises(UnsupportedCheckpoint, match="'a': dtype 'F4'"):
        open_safetensors(with_header(path, {"a": entry([8], 0, 4, "F4")}))
    folder = tmp_path / "two"
    folder.mkdir()
    for name in ("a", "b"):
        with_header(folder / f"{name}.safetensors", {})
    with pytest.raises(CheckpointError, match="2 safetensors files without"):
        open_safetensors(folder)


@pytest.mark.parametrize(
    "file_name",
    ["../secret.safetensors", "/etc/secret.safetensors", "a/b.safetensors", "..", "", "a\\b.safetensors", "x.bin", 7],
)
def test_an_index_cannot_leave_its_folder(file_name: Any, tmp_path: Path) -> None:
    with_header(tmp_path / "secret.safetensors", {"a": entry([4], 0, 16)})
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / INDEX_NAME).write_text(json.dumps({"weight_map": {"a": file_name}}))
    with pytest.raises(CheckpointError, match="only a safetensors file in the index's own folder is allowed"):
        open_safetensors(folder)


def test_an_index_must_agree_with_its_shards(tmp_path: Path) -> None:
    with_header(tmp_path / "1.safetensors", {"a": entry([4], 0, 16), "b": entry([4], 16, 32)})
    for weight_map, message in (
        ({"a": "1.safetensors", "b": "1.safetensors", "c": "1.safetensors"}, "1 tensors are not where it says: .*'c'"),
        ({"a": "1.safetensors"}, "1 tensors are not listed: first 'b' in 1.safetensors"),
        ({"a": "2.safetensors"}, "2.safetensors: cannot be read"),
        ({}, "weight_map: expected a table"),
    ):
        (tmp_path / INDEX_NAME).write_text(json.dumps({"weight_map": weight_map}))
        with pytest.raises(CheckpointError, match=message):
            open_safetensors(tmp_path / INDEX_NAME)


@pytest.fixture(scope="module")
def fuzz_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz")


@settings(deadline=None, max_examples=200)
@given(changes=st.lists(st.tuples(st.integers(0, 150), st.integers(0, 255)), max_size=4), length=st.integers(0, 260))
def test_random_damage_is_refused_or_harmless(changes: list[tuple[int, int]], length: int, fuzz_folder: Path) -> None:
    header = {"a": entry([4], 0, 16), "bc": entry([2, 4], 16, 32, "BF16")}
    path = with_header(fuzz_folder / "model.safetensors", header)
    content = bytearray(path.read_bytes())
    for position, byte in changes:
        content[position] = byte
    path.write_bytes(content[:length])
    try:
        with open_safetensors(path) as files:
            for name in files.tensors:
                files.read(name)
    except CheckpointError:
        pass
