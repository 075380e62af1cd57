"""Descriptions of both containers, ready for JSON."""

import json
import shutil
from pathlib import Path

import pytest

from checkpoints.errors import CheckpointError
from checkpoints.inspect import describe

FIXTURES = Path(__file__).parents[1] / "fixtures"


def test_a_gguf(smollm2_path: Path) -> None:
    description = describe(smollm2_path)
    assert (description.container, description.architecture) == ("gguf", "llama")
    assert description.num_parameters == 134_515_008
    assert description.num_bytes == 98_362_432
    assert (description.context_length, description.num_layers, description.vocab_size) == (8192, 30, 49152)
    assert (description.num_heads, description.num_kv_heads, description.head_size) == (9, 3, 64)
    assert (description.hidden_size, description.ffn_size) == (576, 1536)
    assert list(description.bytes_by_format) == ["Q4_1", "Q8_0", "F32"]
    assert description.tokenizer is not None
    assert (description.tokenizer.kind, description.tokenizer.pre) == ("gpt2", "smollm")
    assert description.chat_template_head[0].startswith("{% for message in messages %}")
    assert json.loads(json.dumps(description.as_dict()))["tensors"][0]["format"] == "Q8_0"


def test_a_gguf_of_types_that_cannot_be_run() -> None:
    description = describe(FIXTURES / "gguf" / "gguf_tensors" / "model.gguf")
    assert "IQ2_XXS" in description.bytes_by_format
    assert description.num_layers is None
    assert description.tokenizer is None
    assert not description.has_chat_template


def test_a_folder(tmp_path: Path) -> None:
    shutil.copytree(FIXTURES / "models" / "llama_bf16_sharded", tmp_path / "model")
    tokenizer = {"model": {"type": "BPE", "vocab": {"a": 0, "b": 1}}}
    (tmp_path / "model" / "tokenizer.json").write_text(json.dumps(tokenizer))
    template = {"chat_template": [{"name": "default", "template": "{{ x }}\n{{ y }}"}]}
    (tmp_path / "model" / "tokenizer_config.json").write_text(json.dumps(template))
    description = describe(tmp_path / "model")
    assert (description.container, description.architecture) == ("safetensors", "LlamaForCausalLM")
    assert (description.num_parameters, description.num_layers, description.head_size) == (106_816, 2, 16)
    assert description.bytes_by_format == {"BF16": 213_632}
    assert description.tokenizer is not None
    assert (description.tokenizer.kind, description.tokenizer.vocab_size) == ("BPE", 2)
    assert description.chat_template_head == ("{{ x }}", "{{ y }}")
    (tmp_path / "model" / "chat_template.jinja").write_text("the file goes first")
    assert describe(tmp_path / "model").chat_template_head == ("the file goes first",)


def test_errors_name_the_file(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nothing: does not exist"):
        describe(tmp_path / "nothing")
    shutil.copytree(FIXTURES / "models" / "llama_bf16_sharded", tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config\.json: is no JSON"):
        describe(tmp_path / "model")
