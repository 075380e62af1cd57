"""A converted model is the model: the same logits, on one device and from eight; and a placed load stays small."""

import json
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from checkpoints.errors import CheckpointError
from jaxserve.engine.conversion import MAX_SIDE_BYTES, convert, encoded, save
from jaxserve.engine.loading import Recipe, load_model
from jaxserve.engine.placement import Placement
from jaxserve.engine.progress import Silent
from jaxserve.engine.step import Program, logits_of_tokens
from jaxserve.kv_cache import cache_spec, empty_cache
from jaxserve.quant.dense import Dense
from jaxserve.quant.formats import FORMATS
from pallas_kernels.kernels import XLA
from pallas_kernels.ragged import RaggedLayout

FIXTURES = Path(__file__).resolve().parent.parent / "fixtures"
HERE = Path(__file__).parent
GGUF = FIXTURES / "gguf" / "gguf_llama_legacy" / "model.gguf"
IDS = np.arange(3, 40, dtype=np.int32)
PAGES, PAGE_SIZE = 3, 16


def packed(path: Path):
    return load_model(path, Recipe(layout="packed", dtype="float32"), Silent())


def logits(path: Path) -> np.ndarray:
    loaded = packed(path)
    config = loaded.model.for_context(loaded.config, len(IDS))
    program = Program(model=loaded.model, config=config, kernels=XLA, dtype="float32")
    cache = empty_cache(cache_spec(config, PAGE_SIZE, "float32"), PAGES, XLA)
    layout = RaggedLayout(
        kv_lengths=jnp.asarray([len(IDS)], jnp.int32),
        query_starts=jnp.asarray([0, len(IDS)], jnp.int32),
        page_table=jnp.arange(PAGES, dtype=jnp.int32)[None],
        num_single_rows=0,
    )
    return np.asarray(jax.jit(partial(logits_of_tokens, program))(loaded.params, cache, jnp.asarray(IDS), layout)[0])


def converted(source: Path, target: Path, format_name: str | None = None) -> Path:
    return convert(source, target, format_name, Silent(), overwrite=False).path


def assert_same_weights(a: Path, b: Path) -> None:
    a_loaded, b_loaded = packed(a), packed(b)
    assert a_loaded.config == b_loaded.config
    a_leaves, b_leaves = jax.tree.flatten(a_loaded.params), jax.tree.flatten(b_loaded.params)
    assert a_leaves[1] == b_leaves[1]
    for want, got in zip(a_leaves[0], b_leaves[0], strict=True):
        assert want.dtype == got.dtype
        np.testing.assert_array_equal(np.asarray(want), np.asarray(got))


def on_eight_devices(*arguments: object) -> str:
    script = [sys.executable, str(HERE / "eight_devices.py"), *map(str, arguments)]
    ran = subprocess.run(script, capture_output=True, text=True, cwd=HERE.parent.parent, timeout=200)
    assert ran.returncode == 0, ran.stderr[-3000:]
    return ran.stdout


SOURCES = [FIXTURES / "models" / name for name in ("llama_untied", "mixtral", "deepseek_v3")] + [GGUF]


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.parent.name if path.suffix else path.name)
def test_a_converted_model_gives_identical_logits(source, tmp_path):
    native = converted(source, tmp_path / "native")
    np.testing.assert_array_equal(logits(source), logits(native))


@pytest.mark.parametrize("name", sorted(path.parent.name for path in FIXTURES.glob("models/*/config.json")))
def test_every_family_keeps_its_weights_and_config(name, tmp_path):
    assert_same_weights(FIXTURES / "models" / name, converted(FIXTURES / "models" / name, tmp_path / "native"))


@pytest.mark.parametrize("name", ["gguf_llama_kquants", "gguf_qwen3", "gguf_gpt_oss", "gguf_deepseek2"])
def test_every_gguf_keeps_its_weights_and_config(name, tmp_path):
    """Also where the config follows from tensors that are no parameters."""
    assert_same_weights(
        FIXTURES / "gguf" / name / "model.gguf", converted(FIXTURES / "gguf" / name / "model.gguf", tmp_path / "native")
    )


@pytest.mark.parametrize("source", [FIXTURES / "models" / "mixtral", GGUF], ids=["mixtral", "gguf"])
def test_from_one_device_to_eight_and_back(source, tmp_path):
    one = converted(source, tmp_path / "one")
    on_eight_devices("compare", one, "packed")
    on_eight_devices("save", one, tmp_path / "eight")
    assert_same_weights(source, tmp_path / "eight")
    np.testing.assert_array_equal(logits(source), logits(tmp_path / "eight"))


@pytest.mark.parametrize("name", ["deepseek_v3", "gpt_oss"])
def test_safetensors_on_eight_devices(name):
    """Experts that are stacked, transposed or interleaved, and rows that are not ours."""
    on_eight_devices("compare", FIXTURES / "models" / name, "packed")
    on_eight_devices("compare", FIXTURES / "models" / name, "expanded")


def test_a_packed_gguf_is_expanded_on_eight_devices():
    on_eight_devices("compare", GGUF, "expanded")


def test_placements_that_cannot_be(tmp_path):
    with pytest.raises(ValueError, match="tiles are for one CPU"):
        load_model(
            GGUF, Recipe(layout="tiled", dtype="float32"), Silent(), Placement(sharding=lambda parameter, spec: None)
        )


def test_native_to_native_and_a_loaded_model(tmp_path):
    first = converted(GGUF, tmp_path / "first")
    assert_same_weights(GGUF, converted(first, tmp_path / "second"))
    save(packed(first), tmp_path / "third", Silent(), overwrite=False)
    assert_same_weights(GGUF, tmp_path / "third")
    tiled = load_model(first, Recipe(layout="tiled", dtype="float32"), Silent())
    with pytest.raises((ValueError, KeyError)):
        save(tiled, tmp_path / "tiled", Silent(), overwrite=False)
    assert not (tmp_path / "tiled").exists()


@pytest.mark.parametrize("format_name", ["BF16", "F16", "Q8_0"])
def test_another_format(format_name, tmp_path):
    source = FIXTURES / "models" / "deepseek_v3"
    done = convert(source, tmp_path / "native", format_name, Silent(), overwrite=False)
    want, got = packed(source), packed(done.path)
    assert got.file_bytes[format_name] > 0
    matrix = want.params["layers"][1]["attention"]["kv_a"]
    stored = got.params["layers"][1]["attention"]["kv_a"]
    expected = FORMATS[format_name].encode(np.asarray(matrix.array))
    assert stored.format == format_name
    np.testing.assert_array_equal(np.asarray(stored.decode()), np.asarray(expected.decode()))
    np.testing.assert_array_equal(np.asarray(want.params["norm"]), np.asarray(got.params["norm"]))
    whole = got.params["layers"][1]["moe"]["experts"]["gate"]
    assert whole.format == ("F32" if "layers.1.moe.experts.gate" in done.kept else format_name)


def test_rows_that_are_no_whole_blocks_are_kept_and_said(tmp_path):
    done = convert(FIXTURES / "models" / "llama_untied", tmp_path / "native", "Q4_K", Silent(), overwrite=False)
    assert done.kept
    assert set(done.bytes_by_format) == {"F32"}


def test_encoding_by_parts_is_encoding(monkeypatch):
    monkeypatch.setattr("jaxserve.engine.conversion.ENCODE_BYTES", 4 * 64 * 7)
    experts = np.random.default_rng(0).normal(size=(3, 5, 64)).astype(np.float32)
    by_parts, at_once = encoded(Dense(array=experts), FORMATS["Q4_1"]), FORMATS["Q4_1"].encode(experts)
    for part, whole in zip(jax.tree.leaves(by_parts), jax.tree.leaves(at_once), strict=True):
        np.testing.assert_array_equal(part, whole)


@pytest.fixture
def native(tmp_path) -> Path:
    return converted(GGUF, tmp_path / "native")


def rewrite(native: Path, change) -> None:
    content = json.loads((native / "jaxserve.json").read_text())
    change(content["parameters"])
    (native / "jaxserve.json").write_text(json.dumps(content))


def first_of(parameters, format_name: str) -> str:
    return next(name for name, entry in parameters.items() if entry["format"] == format_name)


HOSTILE = {
    "a parameter is missing": (lambda p: p.pop("norm"), "1 missing: norm"),
    "a parameter too many": (lambda p: p.update({"../x": p["norm"]}), r"1 unexpected: \.\./x"),
    "another shape": (lambda p: p["norm"].update(shape=[63]), "1 wrongly shaped: norm"),
    "an array is missing": (lambda p: p[first_of(p, "Q4_1")]["arrays"].pop("scale"), "not those of Q4_1"),
    "an array too many": (lambda p: p["norm"]["arrays"].update(x=p["norm"]["arrays"][""]), "not those of F32"),
    "an unknown format": (lambda p: p[first_of(p, "Q4_1")].update(format="Q9"), "Q9; this version computes with"),
    "another format": (lambda p: p[first_of(p, "Q4_1")].update(format="Q4_0"), "not those of Q4_0"),
    "a packed vector": (lambda p: p["norm"].update(format="Q4_1"), "a vector in format 'Q4_1'"),
    "rows of no whole blocks": (lambda p: p[first_of(p, "F16")].update(format="Q4_K"), "not whole blocks of 256"),
}


@pytest.mark.parametrize(("change", "message"), HOSTILE.values(), ids=HOSTILE.keys())
def test_parameters_that_are_not_the_models(native, change, message):
    rewrite(native, change)
    with pytest.raises(CheckpointError, match=message) as caught:
        packed(native)
    assert "\n" not in str(caught.value)


def test_files_that_are_gone_or_cut(native):
    origin = native / "origin.gguf"
    content = origin.read_bytes()
    origin.write_bytes(content[: len(content) // 2])
    with pytest.raises(CheckpointError, match=r"origin\.gguf"):
        packed(native)
    origin.unlink()
    with pytest.raises(CheckpointError, match=r"config\.json: not found"):
        packed(native)


def test_what_lies_beside_the_weights_comes_along(tmp_path, monkeypatch):
    source = Path(shutil.copytree(FIXTURES / "models" / "llama_untied", tmp_path / "source"))
    names = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json", "a.model")
    for name in (*names, "1_Pooling/config.json"):
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_text(name)
    (source / "README.md").write_text("x")
    native = converted(source, tmp_path / "native")
    copied = {str(path.relative_to(native)) for path in native.rglob("*") if path.is_file()}
    ours = {name for name in copied if name.startswith("params/")} | {"jaxserve.json", "config.json"}
    assert copied - ours == {*names, "1_Pooling/config.json"}
    monkeypatch.setattr("jaxserve.engine.conversion.MAX_SIDE_BYTES", 3)
    assert MAX_SIDE_BYTES > 1 << 20
    with pytest.raises(CheckpointError, match="too many for a file beside weights"):
        converted(source, tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_a_disk_that_is_too_small(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: shutil._ntuple_diskusage(10, 9, 1))
    with pytest.raises(CheckpointError, match=r"needs [\d,]+ bytes, 1 are free there"):
        converted(GGUF, tmp_path / "native")


def write_shards(folder: Path, hidden: int, ffn: int, vocab: int, num_layers: int) -> Path:
    """A llama of bfloat16 in four shards."""
    rng = np.random.default_rng(0)

    def values(*shape: int) -> np.ndarray:
        return rng.integers(0x3800, 0x3C00, shape, dtype=np.uint16).view(ml_dtypes.bfloat16)

    shapes = {
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
        **{f"self_attn.{name}_proj": (hidden, hidden) for name in "qkvo"},
        **{f"mlp.{name}_proj": (ffn, hidden) for name in ("gate", "up")},
        "mlp.down_proj": (hidden, ffn),
    }
    top = {"model.embed_tokens": (vocab, hidden), "model.norm": (hidden,), "lm_head": (vocab, hidden)}
    layers = {f"model.layers.{n}.{name}": shape for n in range(num_layers) for name, shape in shapes.items()}
    everything = sorted((top | layers).items())
    shard_of: dict[str, str] = {}
    for number in range(4):
        part = everything[number * len(everything) // 4 : (number + 1) * len(everything) // 4]
        name = f"model-{number + 1:05}-of-00004.safetensors"
        save_file({f"{key}.weight": values(*shape) for key, shape in part}, folder / name)
        shard_of |= {f"{key}.weight": name for key, _ in part}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shard_of}))
    sizes = {"hidden_size": hidden, "intermediate_size": ffn, "vocab_size": vocab, "num_hidden_layers": num_layers}
    rest = {"num_attention_heads": 16, "num_key_value_heads": 16, "rms_norm_eps": 1e-5, "tie_word_embeddings": False}
    head = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "max_position_embeddings": 512}
    (folder / "config.json").write_text(json.dumps(head | sizes | rest))
    return folder


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_a_load_onto_eight_devices_needs_little_memory_of_the_host(tmp_path):
    """Resident memory beyond the weights, at its peak: at most 1.2 times the largest of four shards of 200 MB."""
    folder = write_shards(tmp_path, hidden=1024, ffn=2816, vocab=8192, num_layers=7)
    largest = max(file.stat().st_size for file in folder.glob("*.safetensors"))
    total = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    for layout in ("packed", "expanded"):
        beyond, held = map(int, on_eight_devices("memory", folder, layout).split())
        assert total * 0.99 < held < total * 1.02
        assert beyond <= 1.2 * largest, f"{beyond:,} bytes beyond the weights, the largest shard has {largest:,}"
