"""Models on disk that are not sound: one error that names the file and everything that is wrong."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from checkpoints.errors import CheckpointError, UnsupportedCheckpoint
from jaxserve.engine import loading
from jaxserve.engine.loading import Recipe, load_model, read_config
from jaxserve.engine.progress import Silent

TINY = Path(__file__).resolve().parent.parent / "fixtures" / "models" / "llama_untied"
KEPT = Recipe(layout="packed", dtype="float32")


@pytest.fixture
def model(tmp_path):
    """A copy of the tiny model that a test may damage."""
    for name in ("config.json", "model.safetensors"):
        shutil.copy(TINY / name, tmp_path / name)
    return tmp_path


def rewrite_config(model, **changes):
    config = json.loads((model / "config.json").read_text()) | changes
    (model / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not ...}))


def rewrite_tensors(model, change):
    tensors = load_file(model / "model.safetensors")
    change(tensors)
    save_file(tensors, model / "model.safetensors")


def test_the_sound_model_says_what_it_took():
    loaded = load_model(TINY, KEPT, Silent())
    tensors = load_file(TINY / "model.safetensors")
    assert loaded.num_parameters == sum(tensor.size for tensor in tensors.values())
    assert sum(loaded.file_bytes.values()) == sum(tensor.nbytes for tensor in tensors.values())
    assert loaded.path == TINY
    assert not loaded.is_expanded
    np.testing.assert_array_equal(loaded.params["unembed"].array, tensors["lm_head.weight"])


def test_expanding_is_said_and_changes_the_bytes_held():
    expanded = load_model(TINY, Recipe(layout="expanded", dtype="bfloat16"), Silent())
    assert str(expanded.params["embed"].array.dtype) == "bfloat16"
    assert str(expanded.params["norm"].dtype) == "float32"
    assert expanded.held_bytes < load_model(TINY, KEPT, Silent()).held_bytes


def test_all_that_is_wrong_with_tensors_is_in_one_error(model):
    def damage(tensors):
        tensors["model.norm.extra"] = tensors.pop("model.norm.weight")
        tensors["lm_head.weight"] = np.ascontiguousarray(tensors["lm_head.weight"][:-1])

    rewrite_tensors(model, damage)
    with pytest.raises(CheckpointError) as caught:
        load_model(model, KEPT, Silent())
    for words in ("1 missing: model.norm.weight", "1 unexpected: model.norm.extra", "lm_head.weight is [255, 64]"):
        assert words in str(caught.value)


def test_a_tied_model_may_repeat_its_embedding(model):
    rewrite_config(model, tie_word_embeddings=True)
    assert "unembed" not in load_model(model, KEPT, Silent()).params


@pytest.mark.parametrize(
    ("architectures", "words"),
    [
        (["GPT5ForCausalLM"], r"'GPT5ForCausalLM' is not supported; this version runs .*LlamaForCausalLM"),
        ([], "none given"),
        (..., "none given"),
        ("LlamaForCausalLM", "not a list of names"),
        (5, "not a list of names"),
        ([5], "not a list of names"),
    ],
)
def test_an_unknown_architecture(model, architectures, words):
    rewrite_config(model, architectures=architectures)
    with pytest.raises(CheckpointError, match=words):
        load_model(model, KEPT, Silent())


def test_a_config_that_this_version_cannot_compute(model):
    rewrite_config(model, hidden_act="gelu")
    with pytest.raises(UnsupportedCheckpoint, match="hidden_act 'gelu'"):
        load_model(model, KEPT, Silent())
    rewrite_config(model, hidden_act="silu", rope_scaling={"rope_type": "spiral"})
    with pytest.raises(UnsupportedCheckpoint, match="spiral"):
        load_model(model, KEPT, Silent())
    rewrite_config(model, rope_scaling=None, hidden_size=...)
    with pytest.raises(CheckpointError, match="'hidden_size' is missing"):
        load_model(model, KEPT, Silent())


@pytest.mark.parametrize(
    ("text", "words"), [("{", "not valid JSON"), ("[1]", "holds list, not an object"), ("5", "holds int"), ("", "JSON")]
)
def test_a_config_that_is_no_object(tmp_path, text, words):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=f"config.json: .*{words}"):
        read_config(tmp_path)


def test_a_config_that_is_not_there_or_too_large(tmp_path, monkeypatch):
    with pytest.raises(CheckpointError, match=r"config\.json: not found; a safetensors model needs"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("{}" + " " * 100)
    assert read_config(tmp_path) == read_config(tmp_path / "model.safetensors") == {}
    monkeypatch.setattr(loading, "MAX_CONFIG_BYTES", 101)
    with pytest.raises(CheckpointError, match="102 bytes is no sound"):
        read_config(tmp_path)
