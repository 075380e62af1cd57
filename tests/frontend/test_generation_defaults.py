"""Sampling defaults come from the model's generation_config.json, another one, or none."""

import json
from pathlib import Path

import pytest

from checkpoints.errors import CheckpointError
from jaxserve.errors import ConfigError
from jaxserve.frontend import generation_defaults


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder whose file says all there is to say."""
    content = {"temperature": 0.6, "top_k": 20, "max_new_tokens": 64, "eos_token_id": [7, 9]}
    (tmp_path / "generation_config.json").write_text(json.dumps(content))
    return tmp_path


def test_auto_takes_the_models(model):
    found = generation_defaults("auto", model)
    assert found.sampling == {"temperature": 0.6, "top_k": 20, "max_tokens": 64}
    assert found.joined_eos_ids(frozenset({2})) == {2, 7, 9}
    assert found.is_models
    choices = found.choices(frozenset({2, 7, 9}))
    assert choices["generation_config"].value == str(model / "generation_config.json")
    assert choices["sampling_defaults"].value == found.sampling
    assert choices["eos_token_ids"].value == [2, 7, 9]
    assert all(choice.reason for choice in choices.values())


def test_none_takes_nothing(model):
    found = generation_defaults("none", model)
    assert (found.sampling, found.eos_token_ids, found.is_models) == ({}, frozenset(), False)
    assert found.choices(frozenset())["generation_config"].value == "none"


def test_a_gguf_has_none_beside_it(model):
    (model / "m.gguf").write_bytes(b"GGUF")
    assert generation_defaults("auto", model / "m.gguf").sampling == {}


@pytest.mark.parametrize("suffix", ["", "generation_config.json"])
def test_another_file_or_its_folder(model, tmp_path_factory, suffix):
    found = generation_defaults(str(model / suffix), tmp_path_factory.mktemp("other"))
    assert found.sampling["top_k"] == 20
    assert not found.is_models


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(ConfigError, match="--generation-config 'vllm': no such file; give auto, none"):
        generation_defaults("vllm", tmp_path)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"temperature": -1}, "temperature must be from 0 to 100, got -1"),
        ({"top_p": 0}, "top_p must be above 0"),
        ({"top_k": -2}, "top_k must be from -1"),
        ({"max_new_tokens": 0}, "max_new_tokens must be from 1"),
        ({"repetition_penalty": 0}, "repetition_penalty must be above 0"),
    ],
)
def test_values_out_of_range_name_file_and_field(tmp_path, content, said):
    file = tmp_path / "generation_config.json"
    file.write_text(json.dumps(content))
    with pytest.raises(CheckpointError) as caught:
        generation_defaults("auto", tmp_path)
    assert str(caught.value).startswith(f"{file}: {said}")
    assert "--generation-config none" in str(caught.value)


def test_nan_is_no_temperature(tmp_path):
    (tmp_path / "generation_config.json").write_text('{"temperature": NaN}')
    with pytest.raises(CheckpointError, match="temperature must be from 0 to 100"):
        generation_defaults("auto", tmp_path)


def test_no_more_ends_than_a_step_has_room_for(model):
    with pytest.raises(CheckpointError, match="18 ids end a generation; at most 16"):
        generation_defaults("auto", model).joined_eos_ids(frozenset(range(100, 116)))
