"""Llama checkpoints against logits of an independent implementation (transformers, float32, one prompt at a time)."""

import pytest
from parity import (
    FIXTURES,
    assert_decode_parity,
    assert_greedy_parity,
    assert_last_logits_parity,
    assert_parity,
)

from jaxserve.config import EngineConfig
from pallas_kernels.kernels import REFERENCE

HF = ["llama_untied", "llama_tied_bias_llama3", "llama_yarn", "llama_linear", "llama_bf16_sharded", "mistral_swa"]


@pytest.mark.parametrize("name", HF)
def test_logits_at_every_position(name):
    assert_parity(FIXTURES / "models" / name)


@pytest.mark.parametrize("name", HF)
def test_logits_behind_prompts_of_every_length(name):
    assert_last_logits_parity(FIXTURES / "models" / name)


@pytest.mark.parametrize("name", ["llama_untied", "mistral_swa"])
def test_logits_of_tokens_decoded_one_by_one(name):
    assert_decode_parity(FIXTURES / "models" / name)


@pytest.mark.parametrize("name", ["llama_untied", "llama_tied_bias_llama3"])
@pytest.mark.parametrize("change", [{"kernels": REFERENCE}, {"stacked": True}, {"weights": "packed"}], ids=str)
def test_other_ways_to_run_give_the_same_logits(name, change):
    assert_parity(FIXTURES / "models" / name, **change)


@pytest.mark.parametrize("name", ["gguf_llama_legacy", "gguf_llama_kquants"])
@pytest.mark.parametrize("weights", ["expanded", "packed"])
def test_gguf_of_every_format(name, weights):
    """Q4_0 to Q8_0, F16, BF16 and F32 in one file, Q2_K to Q6_K in the other, expanded at load and computed packed."""
    folder = FIXTURES / "gguf" / name
    assert_parity(folder, folder / "model.gguf", weights=weights)


@pytest.mark.parametrize("name", ["llama_untied", "llama_yarn"])
def test_greedy_ids_through_the_engine(name):
    assert_greedy_parity(FIXTURES / "models" / name)


def test_options_of_the_engine_are_those_of_llm():
    assert {"model", "max_model_len", "max_num_seqs", "page_size", "kv_cache_dtype", "seed"} <= EngineConfig.names()
