"""generation_config.json: known fields by their own names, and one line about what cannot be."""

import json
from pathlib import Path

import pytest

from checkpoints.errors import CheckpointError
from checkpoints.generation_config import generation_config_beside, read_generation_config


def _read(tmp_path: Path, content: object):
    file = tmp_path / "generation_config.json"
    file.write_text(content if isinstance(content, str) else json.dumps(content))
    return read_generation_config(file)


def test_known_fields_are_read_and_others_left(tmp_path):
    found = _read(
        tmp_path,
        {
            "do_sample": True,
            "temperature": 0.6,
            "top_k": 20,
            "top_p": 0.95,
            "min_p": None,
            "max_new_tokens": 2048,
            "eos_token_id": [1, 106, 1],
            "transformers_version": "4.50.0",
        },
    )
    assert found.sampling == {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "max_new_tokens": 2048}
    assert found.eos_token_ids == {1, 106}


@pytest.mark.parametrize(
    ("content", "temperature"),
    [
        ({"do_sample": False, "temperature": 0.6}, 0.0),
        ({"do_sample": True}, 1.0),
        ({"do_sample": True, "temperature": 0.6}, 0.6),
        ({"do_sample": None, "temperature": 0.6}, 0.6),
        ({}, None),
    ],
)
def test_do_sample_decides_about_the_temperature(tmp_path, content, temperature):
    assert _read(tmp_path, content).sampling.get("temperature") == temperature


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"temperature": "hot"}, "temperature must be a number, got 'hot'"),
        ({"temperature": 10**400}, "temperature must be a number, got 1000"),
        ({"temperature": True}, "temperature must be a number, got True"),
        ({"top_p": [0.5]}, "top_p must be a number"),
        ({"top_k": 2.5}, "top_k must be an integer, got 2.5"),
        ({"max_new_tokens": "many"}, "max_new_tokens must be an integer"),
        ({"do_sample": "yes"}, "do_sample must be true or false"),
        ({"eos_token_id": "end"}, "eos_token_id must be a token id or a list of them"),
        ({"eos_token_id": [1, -1]}, "eos_token_id must be a token id or a list of them"),
        ({"eos_token_id": [1, True]}, "eos_token_id must be a token id or a list of them"),
        ({"eos_token_id": 2**31}, "eos_token_id must be a token id or a list of them"),
        ({"eos_token_id": list(range(17))}, "eos_token_id lists 17 ids; at most 16"),
        ("[1]", "is no JSON object"),
        ("{", "is no JSON"),
        ('{"top_k": 1, "top_k": 2}', "a key occurs twice"),
    ],
)
def test_what_cannot_be_is_one_line_with_file_and_field(tmp_path, content, said):
    with pytest.raises(CheckpointError) as caught:
        _read(tmp_path, content)
    assert str(caught.value).startswith(f"{tmp_path / 'generation_config.json'}: ")
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300 + len(str(tmp_path))


def test_the_file_lies_beside_the_weights(tmp_path):
    assert generation_config_beside(tmp_path) is None
    (tmp_path / "generation_config.json").write_text("{}")
    for weights in (tmp_path, tmp_path / "model.safetensors"):
        assert generation_config_beside(weights) == tmp_path / "generation_config.json"
