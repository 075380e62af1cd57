"""What is particular to llama; test_parity.py compares it with an independent implementation."""

import pytest
from parity import FIXTURES, assert_greedy_parity, assert_parity

from jaxserve.config import EngineConfig
from pallas_kernels.kernels import REFERENCE


@pytest.mark.parametrize("name", ["llama_untied", "llama_tied_bias_llama3"])
@pytest.mark.parametrize("change", [{"kernels": REFERENCE}, {"stacked": True}, {"weights": "packed"}], ids=str)
def test_other_ways_to_run_give_the_same_logits(name, change):
    assert_parity(FIXTURES / "models" / name, **change)


@pytest.mark.parametrize("name", ["llama_untied"])
def test_greedy_ids_through_the_engine(name):
    assert_greedy_parity(FIXTURES / "models" / name)


def test_options_of_the_engine_are_those_of_llm():
    assert {"model", "max_model_len", "max_num_seqs", "page_size", "kv_cache_dtype", "seed"} <= EngineConfig.names()
