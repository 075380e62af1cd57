"""Sizes that no model has are refused by their field's name, before anything is made of them."""

import json
import shutil

import pytest
from parity import FIXTURES

from checkpoints.errors import CheckpointError
from jaxserve.engine.loading import model_config


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 10**12}, r"num_hidden_layers is 1000000000000; a whole number from 1 to 4,096"),
        ({"num_hidden_layers": None}, "num_hidden_layers is None; a whole number"),
        ({"hidden_size": "64"}, "hidden_size is '64'; a whole number"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0; a whole number"),
        ({"vocab_size": -1}, "vocab_size is -1; a whole number"),
        ({"head_dim": True}, "head_dim is True; a whole number"),
        ({"rope_scaling": "abc"}, "rope_scaling is 'abc', not a table"),
        ({"text_config": {"hidden_size": 1.5}}, r"text_config: hidden_size is 1\.5; a whole number"),
    ],
)
def test_sizes_that_cannot_be(changes, message, tmp_path):
    folder = shutil.copytree(FIXTURES / "models" / "llama_untied", tmp_path / "m")
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=rf"config\.json: {message}"):
        model_config(folder)
