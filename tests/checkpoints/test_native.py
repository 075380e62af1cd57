"""The native container: what was written is read, whole and by the slice; what is unfinished or hostile is refused."""

import json
import shutil
from pathlib import Path

import ml_dtypes
import numpy as np
import orbax.checkpoint
import pytest

from checkpoints.errors import CheckpointError, UnsupportedCheckpoint
from checkpoints.load import open_weights
from checkpoints.native import ArrayInfo, Manifest, NativeArrays, NativeParameter, OriginTensor, is_native, open_native
from checkpoints.native_writing import COMMIT_BYTES, chunk_shape, writing_native

RNG = np.random.default_rng(0)
ARRAYS = {
    "embed": {"quants": RNG.integers(0, 255, (4096, 512), np.uint8), "scale": RNG.random((4096, 32)).astype("f2")},
    "layers.0.experts": {"": RNG.random((3, 64, 32)).astype(ml_dtypes.bfloat16)},
    "norm": {"": np.zeros(7, np.float32)},  # all zeros are stored too
}
ORIGIN = {"token_embd.weight": OriginTensor(format="Q4_0", shape=(4096, 1024))}


def parameter(arrays, write) -> NativeParameter:
    infos = {part: write(part, array) for part, array in arrays.items()}
    return NativeParameter(format="X", shape=next(iter(arrays.values())).shape, arrays=infos)


def write(target: Path, arrays=ARRAYS, *, overwrite=False) -> Path:
    with writing_native(target, overwrite=overwrite) as writer:
        made = {
            name: parameter(parts, lambda part, array, name=name: writer.write(name, part, array))
            for name, parts in arrays.items()
        }
        writer.finish(Manifest(parameters=made, origin_tensors=ORIGIN))
    return target


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Path:
    return write(tmp_path_factory.mktemp("native") / "model")


@pytest.fixture
def model(written, tmp_path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(written, tmp_path / "model"))


def rewrite(model: Path, change) -> None:
    content = json.loads((model / "jaxserve.json").read_text())
    change(content)
    (model / "jaxserve.json").write_text(json.dumps(content))


def read_all(native: NativeArrays) -> None:
    for name, found in native.parameters.items():
        for part in found.arrays:
            native.read(name, part)


def test_what_was_written_is_read(written):
    native = open_native(written)
    assert native.origin_tensors == ORIGIN
    assert native.parameters["embed"].arrays["scale"] == ArrayInfo(dtype="float16", shape=(4096, 32))
    for name, parts in ARRAYS.items():
        for part, array in parts.items():
            read = native.read(name, part)
            assert read.dtype == array.dtype
            np.testing.assert_array_equal(read, array)
    cut = (slice(1000, 1003), slice(5, 9))
    np.testing.assert_array_equal(native.read("embed", "quants", cut), ARRAYS["embed"]["quants"][cut])


def test_orbax_reads_it(written):
    restored = orbax.checkpoint.PyTreeCheckpointer().restore(written / "params")
    np.testing.assert_array_equal(restored["embed"]["quants"], ARRAYS["embed"]["quants"])
    np.testing.assert_array_equal(restored["layers"]["0"]["experts"], ARRAYS["layers.0.experts"][""])
    np.testing.assert_array_equal(restored["norm"], ARRAYS["norm"][""])


def test_more_arrays_than_one_commit_takes(tmp_path):
    arrays = {f"w.{n}": {"": np.full((COMMIT_BYTES // 3,), n, np.uint8)} for n in range(5)}
    native = open_native(write(tmp_path / "model", arrays))
    assert [int(native.read(f"w.{n}", "")[-1]) for n in range(5)] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("shape", "chunks"),
    [
        ((7,), [7]),
        ((16, 16), [16, 16]),
        ((4096, 4096), [512, 4096]),
        ((49152, 288), [6144, 288]),
        ((8, 4096, 1024), [1, 4096, 1024]),
        ((4099, 4096), [512, 4096]),
        ((2, 3, 8192, 8192), [1, 1, 4096, 8192]),
    ],
)
def test_chunks_are_whole_rows_that_meet_the_edges_of_devices(shape, chunks):
    assert chunk_shape(ArrayInfo(dtype="uint8", shape=shape)) == chunks


@pytest.mark.parametrize(
    ("parts", "chunks"), [((8, 1), [64, 4096]), ((1, 8), [512, 512]), ((2, 4), [256, 1024]), ((3, 1), [512, 4096])]
)
def test_chunks_for_a_plan_are_parts_of_what_one_device_has(parts, chunks):
    assert chunk_shape(ArrayInfo(dtype="uint8", shape=(4096, 4096)), parts) == chunks


def fail_in_the_middle(target: Path) -> None:
    with writing_native(target, overwrite=False) as writer:
        writer.write("norm", "", np.ones(3, np.float32))
        with pytest.raises(CheckpointError, match="an unfinished conversion"):
            open_weights(writer.path)
        with pytest.raises(CheckpointError, match="another conversion"):
            write(target)
        raise RuntimeError


def test_an_unfinished_folder_does_not_load(tmp_path):
    with pytest.raises(RuntimeError):
        fail_in_the_middle(tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_whose_manifest_is_gone_is_unfinished(model):
    (model / "jaxserve.json").unlink()
    assert is_native(model)
    with pytest.raises(CheckpointError, match="an unfinished conversion; run `jaxserve convert` again"):
        open_weights(model)


def test_what_a_killed_run_left_goes_with_the_next(tmp_path):
    left = tmp_path / "model.unfinished"
    (left / "params" / "d").mkdir(parents=True)
    (left / "jaxserve.json").write_text("{}")
    with pytest.raises(CheckpointError, match="an unfinished conversion"):
        open_weights(left)
    write(tmp_path / "model")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_what_is_in_the_way(model, tmp_path):
    with pytest.raises(CheckpointError, match="exists already; choose another name, or --overwrite"):
        write(model)
    write(model, {"norm": ARRAYS["norm"]}, overwrite=True)
    assert list(open_native(model).parameters) == ["norm"]
    (tmp_path / "mine").mkdir()
    with pytest.raises(CheckpointError, match="is no native checkpoint, so --overwrite does not replace it"):
        write(tmp_path / "mine", overwrite=True)
    with pytest.raises(CheckpointError, match="there is no folder"):
        write(tmp_path / "no" / "model")
    with pytest.raises(CheckpointError, match="names that end in"):
        write(tmp_path / "model.unfinished")


def set_array(content, **changes):
    content["parameters"]["embed"]["arrays"]["quants"] |= changes


HOSTILE = {
    "a version to come": (lambda c: c.update(version=2), "version 2; this version of jaxserve reads version 1"),
    "no container": (lambda c: c.pop("container"), "none of jaxserve's"),
    "parameters as a list": (lambda c: c.update(parameters=[1]), "parameters: expected a table of tables"),
    "absurd sizes": (lambda c: set_array(c, shape=[1 << 40, 1 << 40]), "declares .* bytes of arrays, the files"),
    "a size too large": (lambda c: set_array(c, shape=[1 << 60]), "is no list of up to 8 sizes"),
    "a size of 0": (lambda c: set_array(c, shape=[0, 512]), "is no list of up to 8 sizes"),
    "a size that is a bool": (lambda c: set_array(c, shape=[True]), "is no list of up to 8 sizes"),
    "an unknown dtype": (lambda c: set_array(c, dtype="object"), "dtype 'object' is none of"),
    "a format that is no name": (lambda c: c["parameters"]["embed"].update(format=["X"]), "is no name"),
    "an origin without a shape": (lambda c: c["origin_tensors"]["token_embd.weight"].pop("shape"), "shape None"),
}


@pytest.mark.parametrize(("change", "message"), HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_manifests(model, change, message):
    rewrite(model, change)
    with pytest.raises(CheckpointError, match=message) as caught:
        open_native(model)
    assert "\n" not in str(caught.value)
    assert str(model) in str(caught.value)
    assert isinstance(caught.value, UnsupportedCheckpoint) == ("version 2" in message)


NOT_STORED = {
    "a wrong shape": lambda c: set_array(c, shape=[4096, 256]),
    "a wrong rank": lambda c: set_array(c, shape=[4096 * 512]),
    "a wrong dtype": lambda c: set_array(c, dtype="int8"),
    "a missing array": lambda c: c["parameters"].update(other=c["parameters"]["norm"]),
    "a path out of the folder": lambda c: c["parameters"].update({"../../etc/passwd": c["parameters"]["norm"]}),
    "an absolute path": lambda c: c["parameters"].update({"/etc/passwd": c["parameters"]["norm"]}),
}


@pytest.mark.parametrize("change", NOT_STORED.values(), ids=NOT_STORED.keys())
def test_arrays_that_are_not_what_the_manifest_says(model, change):
    rewrite(model, change)
    with pytest.raises(CheckpointError, match=r"is damaged or not what jaxserve\.json says") as caught:
        read_all(open_native(model))
    assert "\n" not in str(caught.value)


def data_files(model: Path) -> list[Path]:
    return sorted((model / "params" / "d").iterdir(), key=lambda file: file.stat().st_size)


def test_damaged_files(model):
    largest = data_files(model)[-1]
    content = largest.read_bytes()
    largest.write_bytes(content[: len(content) // 2] + b"")
    with pytest.raises(CheckpointError, match="declares"):
        open_native(model)
    largest.write_bytes(content[: len(content) // 2])
    (model / "params" / "filler").write_bytes(bytes(len(content)))
    with pytest.raises(CheckpointError, match="is damaged"):
        read_all(open_native(model))
    largest.write_bytes(content)
    read_all(open_native(model))
    for name in ("manifest.ocdbt", "d"):
        (model / "params" / name).rename(model / "params" / f"{name}.gone")
        with pytest.raises(CheckpointError, match="is damaged"):
            read_all(open_native(model))
        (model / "params" / f"{name}.gone").rename(model / "params" / name)


@pytest.mark.parametrize("seed", range(8))
def test_flipped_bytes_of_the_store_itself_are_noticed(model, seed):
    rng = np.random.default_rng(seed)
    manifest = model / "params" / "manifest.ocdbt"
    content = bytearray(manifest.read_bytes())
    content[rng.integers(len(content))] ^= 1 << rng.integers(8)
    manifest.write_bytes(content)
    with pytest.raises(CheckpointError, match="is damaged"):
        read_all(open_native(model))
