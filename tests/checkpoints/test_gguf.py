"""Sound GGUF files of both versions are read as the gguf package reads them; hostile ones raise CheckpointError."""

import struct
import tracemalloc
from collections.abc import Sequence
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpoints.errors import CheckpointError, UnsupportedCheckpoint
from checkpoints.gguf import MAX_ARRAY_ITEMS, open_gguf
from checkpoints.tensors import BLOCK_SIZES, GGUF_TYPE_NAMES

FIXTURES = Path(__file__).parents[1] / "fixtures" / "gguf"
U32, F32, BOOL, STRING, ARRAY, U64 = 4, 6, 7, 8, 9, 10


def string(text: str | bytes) -> bytes:
    content = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(content)) + content


def key_value(key: str | bytes, kind: int, payload: bytes) -> bytes:
    return string(key) + struct.pack("<I", kind) + payload


def array(kind: int, items: Sequence[bytes], count: int | None = None) -> bytes:
    return struct.pack("<IQ", kind, len(items) if count is None else count) + b"".join(items)


def tensor(name: str, dims: Sequence[int], kind: int = 0, offset: int = 0, num_dims: int | None = None) -> bytes:
    head = string(name) + struct.pack("<I", len(dims) if num_dims is None else num_dims)
    return head + struct.pack(f"<{len(dims)}QIQ", *dims, kind, offset)


def gguf_bytes(
    key_values: Sequence[bytes] = (),
    tensors: Sequence[bytes] = (),
    *,
    data: bytes = b"",
    version: int = 3,
    num_tensors: int | None = None,
    num_keys: int | None = None,
    magic: bytes = b"GGUF",
) -> bytes:
    counts = (
        len(tensors) if num_tensors is None else num_tensors,
        len(key_values) if num_keys is None else num_keys,
    )
    head = magic + struct.pack("<IQQ", version, *counts) + b"".join(key_values) + b"".join(tensors)
    return head + b"\0" * (-len(head) % 32) + data


def tiny_gguf(version: int = 3) -> bytes:
    """A little of everything: scalars, strings, nested arrays, a plain and a quantized tensor."""
    nested = array(ARRAY, [array(U32, [struct.pack("<I", 7)] * 2), array(STRING, [string("ä")])])
    return gguf_bytes(
        [
            key_value("general.architecture", STRING, string("llama")),
            key_value("llama.block_count", U32, struct.pack("<I", 2)),
            key_value("flag", BOOL, b"\1"),
            key_value("eps", F32, struct.pack("<f", 0.5)),
            key_value("tokens", ARRAY, array(STRING, [string("a"), string("bc")])),
            key_value("flags", ARRAY, array(BOOL, [b"\0", b"\1"])),
            key_value("nested", ARRAY, nested),
        ],
        [tensor("norm", [4]), tensor("blk.0.w", [32, 3], kind=3, offset=32)],
        data=np.arange(4, dtype="<f4").tobytes() + b"\0" * 16 + bytes(range(60)) + b"\0" * 4,
        version=version,
    )


def written(folder: Path, content: bytes) -> Path:
    path = folder / "model.gguf"
    path.write_bytes(content)
    return path


@pytest.mark.parametrize("version", [2, 3])
def test_both_versions_give_plain_values_and_views(version: int, tmp_path: Path) -> None:
    with open_gguf(written(tmp_path, tiny_gguf(version))) as file:
        assert file.version == version
        assert file.metadata == {
            "general.architecture": "llama",
            "llama.block_count": 2,
            "flag": True,
            "eps": 0.5,
            "tokens": ["a", "bc"],
            "flags": [False, True],
            "nested": [[7, 7], ["ä"]],
        }
        assert file.metadata["flags"][1] is True
        weight = file.tensors["blk.0.w"]
        assert (weight.shape, weight.format, weight.num_bytes, weight.num_elements) == ((3, 32), "Q4_1", 60, 96)
        assert file.raw("norm").view("<f4").tolist() == [0, 1, 2, 3]
        raw = file.raw("blk.0.w")
    assert raw.tolist() == np.arange(60).reshape(3, 20).tolist()  # still there after close
    assert not raw.flags.writeable


@pytest.mark.parametrize("name", ["gguf_tensors", "gguf_llama_legacy", "gguf_llama_kquants"])
def test_real_files_agree_with_the_gguf_package(name: str) -> None:
    path = FIXTURES / name / "model.gguf"
    reader = gguf.GGUFReader(path)
    with open_gguf(path) as file:
        assert set(file.tensors) == {tensor.name for tensor in reader.tensors}
        for expected in reader.tensors:
            info = file.tensors[expected.name]
            assert info.format == expected.tensor_type.name
            assert info.shape == tuple(int(size) for size in expected.shape[::-1])
            assert file.raw(expected.name).tobytes() == expected.data.tobytes()
        for key, field in reader.fields.items():
            if not key.startswith("GGUF."):
                assert file.metadata[key] == field.contents(), key


def test_the_type_table_is_that_of_the_gguf_package() -> None:
    expected = {kind.value: kind.name for kind in gguf.GGMLQuantizationType}
    assert expected.items() <= GGUF_TYPE_NAMES.items()
    for kind, (num_elements, num_bytes) in gguf.GGML_QUANT_SIZES.items():
        block = BLOCK_SIZES[kind.name]
        assert (block.num_elements, block.num_bytes) == (num_elements, num_bytes)


HUGE = (1 << 64) - 1
DAMAGED = {
    "empty": (b"", "the file is empty"),
    "other magic": (gguf_bytes(magic=b"GGML"), "magic: the file starts with b'GGML'"),
    "only magic": (b"GGUF", "version: needs 4 bytes at offset 4"),
    "tensor count": (gguf_bytes(num_tensors=HUGE), "tensor count: .* cannot fit"),
    "key count": (gguf_bytes(num_keys=1 << 40), "metadata count: .* cannot fit"),
    "key length": (gguf_bytes([struct.pack("<QQ", HUGE, 0)]), "metadata key 0, string length"),
    "value length": (gguf_bytes([key_value("a", STRING, struct.pack("<Q", 1 << 50))]), "metadata 'a', string length"),
    "value type": (gguf_bytes([key_value("a", 13, b"")]), "metadata 'a': value type 13"),
    "bool": (gguf_bytes([key_value("a", BOOL, b"\2")]), "metadata 'a': a bool is stored as 2"),
    "not utf-8": (gguf_bytes([key_value("a", STRING, string(b"\xff"))]), "metadata 'a': a string is not UTF-8"),
    "item length": (
        gguf_bytes([key_value("a", ARRAY, array(STRING, [string("ok"), struct.pack("<Q", 1 << 50)]))]),
        "metadata 'a', string length: 1,125,899,906,842,624 items cannot fit",
    ),
    "item not utf-8": (
        gguf_bytes([key_value("a", ARRAY, array(STRING, [string(b"\xff"), string("ok")]))]),
        "metadata 'a': a string is not UTF-8",
    ),
    "array count": (gguf_bytes([key_value("a", ARRAY, array(U64, [], count=HUGE))]), "metadata 'a', array length"),
    "array type": (gguf_bytes([key_value("a", ARRAY, array(99, []))]), "array item type 99"),
    "key twice": (gguf_bytes([key_value("a", BOOL, b"\0")] * 2), "metadata 'a': the key occurs twice"),
    "alignment 0": (gguf_bytes([key_value("general.alignment", U32, bytes(4))]), "general.alignment.*power of two"),
    "alignment 24": (gguf_bytes([key_value("general.alignment", U32, b"\x18\0\0\0")]), "24 is no power of two"),
    "alignment text": (gguf_bytes([key_value("general.alignment", STRING, string("32"))]), "general.alignment"),
    "name twice": (gguf_bytes([], [tensor("w", [1]), tensor("w", [1], offset=32)], data=bytes(64)), "'w': the name"),
    "no dims": (gguf_bytes([], [tensor("w", [], num_dims=0)], data=bytes(64)), "'w': 0 dimensions"),
    "many dims": (gguf_bytes([], [tensor("w", [1], num_dims=1 << 31)]), "dimensions; 1 to 4"),
    "zero dim": (gguf_bytes([], [tensor("w", [0, 4])], data=bytes(64)), "'w': a dimension of .* is 0"),
    "overflow": (gguf_bytes([], [tensor("w", [1 << 32, 1 << 32])], data=bytes(64)), "'w': ends at byte"),
    "half block": (gguf_bytes([], [tensor("w", [33], kind=2)], data=bytes(64)), "'w': rows of 33 .* Q4_0"),
    "outside": (gguf_bytes([], [tensor("w", [8], offset=64)], data=bytes(64)), "'w': ends at byte"),
    "far outside": (gguf_bytes([], [tensor("w", [8], offset=HUGE - 31)], data=bytes(64)), "'w': ends at byte"),
    "unaligned": (gguf_bytes([], [tensor("w", [8], offset=4)], data=bytes(64)), "'w': its offset 4"),
    "overlap": (
        gguf_bytes([], [tensor("a", [16]), tensor("b", [4], offset=32)], data=bytes(96)),
        "'b': its bytes overlap those of tensor 'a'",
    ),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_a_damaged_file_is_refused_by_file_and_field(case: str, tmp_path: Path) -> None:
    content, message = DAMAGED[case]
    path = written(tmp_path, content)
    with pytest.raises(CheckpointError, match=message) as caught:
        open_gguf(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert not isinstance(caught.value, UnsupportedCheckpoint)


@pytest.mark.parametrize("name", sorted(name for name, block in BLOCK_SIZES.items() if block.num_elements > 1))
def test_sizes_of_every_block_format_are_checked(name: str, tmp_path: Path) -> None:
    """Rows that end inside a block, and blocks that end behind the file."""
    kind = {name: number for number, name in GGUF_TYPE_NAMES.items()}[name]
    block = BLOCK_SIZES[name]
    half = gguf_bytes([], [tensor("w", [block.num_elements // 2], kind=kind)], data=bytes(512))
    with pytest.raises(CheckpointError, match=rf"'w': rows of .* whole {name} blocks of {block.num_elements}$"):
        open_gguf(written(tmp_path, half))
    short = gguf_bytes([], [tensor("w", [block.num_elements, 2], kind=kind)], data=bytes(2 * block.num_bytes - 1))
    with pytest.raises(CheckpointError, match=r"'w': ends at byte [\d,]+, the file at [\d,]+$"):
        open_gguf(written(tmp_path, short))


def test_deeply_nested_arrays_are_refused(tmp_path: Path) -> None:
    value = array(U32, [])
    for _ in range(5000):
        value = array(ARRAY, [value])
    with pytest.raises(CheckpointError, match="nested more than 4 deep"):
        open_gguf(written(tmp_path, gguf_bytes([key_value("a", ARRAY, value)])))


def test_arrays_together_are_limited(tmp_path: Path) -> None:
    value = struct.pack("<IQ", 0, MAX_ARRAY_ITEMS // 2 + 1) + bytes(MAX_ARRAY_ITEMS // 2 + 1)
    with pytest.raises(CheckpointError, match="metadata 'b': the arrays hold more than"):
        open_gguf(written(tmp_path, gguf_bytes([key_value("a", ARRAY, value), key_value("b", ARRAY, value)])))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (gguf_bytes(version=1), "GGUF version 1; versions 2 and 3 are read"),
        (gguf_bytes(version=3 << 24), "big-endian"),
        (gguf_bytes([], [tensor("w", [32], kind=31)], data=bytes(64)), "'w': tensor type 31 is Q4_0_4_4"),
        (gguf_bytes([], [tensor("w", [32], kind=999)], data=bytes(64)), "'w': tensor type 999 is unknown"),
    ],
)
def test_what_this_version_cannot_read_is_named(content: bytes, message: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedCheckpoint, match=message):
        open_gguf(written(tmp_path, content))


def test_a_missing_file_and_a_missing_tensor_are_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"nothing\.gguf: cannot be read: No such file"):
        open_gguf(tmp_path / "nothing.gguf")
    with (
        open_gguf(written(tmp_path, tiny_gguf())) as file,
        pytest.raises(CheckpointError, match="has no tensor 'output'"),
    ):
        file.raw("output")


def is_refused_or_sound(path: Path) -> bool:
    """Whether the file is refused; if not, everything in it can be read. Fails on any other exception."""
    tracemalloc.start()
    try:
        with open_gguf(path) as file:
            for name, info in file.tensors.items():
                assert file.raw(name).nbytes == info.num_bytes
        return False
    except CheckpointError:
        return True
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 1 << 20, f"{peak:,} bytes for a file of {path.stat().st_size}"


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    content = tiny_gguf()
    last_tensor_end = len(content) - 4
    for length in [*range(0, last_tensor_end, 3), *range(last_tensor_end - 3, len(content))]:
        refused = is_refused_or_sound(written(tmp_path, content[:length]))
        assert refused == (length < last_tensor_end), length


@pytest.mark.parametrize("value", [0, 1 << 32, HUGE])
def test_a_huge_number_anywhere_is_refused_or_harmless(value: int, tmp_path: Path) -> None:
    content = tiny_gguf()
    num_refused = 0
    for position in range(4, len(content) - 100, 2):  # the last 128 bytes are the tensors' values
        changed = content[:position] + struct.pack("<Q", value) + content[position + 8 :]
        num_refused += is_refused_or_sound(written(tmp_path, changed))
    assert num_refused > 50


@pytest.fixture(scope="module")
def fuzz_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz")


@settings(deadline=None, max_examples=100)
@given(
    changes=st.lists(st.tuples(st.integers(0, len(tiny_gguf()) - 1), st.integers(0, 255)), max_size=6),
    length=st.integers(0, len(tiny_gguf())) | st.none(),
    version=st.sampled_from([2, 3]),
)
def test_random_damage_is_refused_or_harmless(
    changes: list[tuple[int, int]], length: int | None, version: int, fuzz_folder: Path
) -> None:
    content = bytearray(tiny_gguf(version))
    for position, byte in changes:
        content[position] = byte
    is_refused_or_sound(written(fuzz_folder, bytes(content[:length])))


def test_the_default_model(smollm2_path: Path) -> None:
    with open_gguf(smollm2_path) as file:
        assert len(file.metadata["tokenizer.ggml.tokens"]) == 49152
        assert {info.format for info in file.tensors.values()} == {"F32", "Q4_1", "Q8_0"}
        assert file.raw("token_embd.weight").shape == (49152, 612)
