"""Llama checkpoints against logits of an independent implementation (transformers, float32, one prompt at a time)."""

import os
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.config import EngineConfig
from jaxserve.engine.loading import Recipe, load_model
from jaxserve.engine.progress import Silent
from jaxserve.engine.step import Program, logits_of_tokens
from jaxserve.kv_cache import KVCacheSpec, empty_cache
from jaxserve.layers.stack import stack_layers
from jaxserve.offline import LLM
from jaxserve.sampling_params import SamplingParams
from pallas_kernels.kernels import REFERENCE, XLA
from pallas_kernels.ragged import RaggedLayout

FIXTURES = Path(__file__).resolve().parent.parent / "fixtures"
HF = ["llama_untied", "llama_tied_bias_llama3", "llama_yarn", "llama_linear", "llama_bf16_sharded"]
TOLERANCE = 5e-4  # float32; the reference itself moves by 1e-5 against float64
PAGE = 16


def whole_prompt_logits(
    path: Path, ids: np.ndarray, kernels=XLA, weights: Any = "expanded", stacked=False
) -> np.ndarray:
    """Logits at every token of one prompt, run as one chunk through the paged cache."""
    loaded = load_model(path, Recipe(layout=weights, dtype="float32"), Silent())
    params = loaded.params
    if stacked:
        params = {**params, "layers": stack_layers(params["layers"])}
    config, pages = loaded.config, -(-len(ids) // PAGE)
    spec = KVCacheSpec(
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_size=config.head_size,
        page_size=PAGE,
        dtype="float32",
    )
    layout = RaggedLayout(
        kv_lengths=jnp.asarray([len(ids)], jnp.int32),
        query_starts=jnp.asarray([0, len(ids)], jnp.int32),
        page_table=jnp.arange(pages, dtype=jnp.int32)[None, ::-1],
        num_single_rows=0,
    )
    program = Program(model=loaded.model, config=config, kernels=kernels, dtype="float32")
    run = jax.jit(partial(logits_of_tokens, program))
    logits, _ = run(params, empty_cache(spec, pages, kernels), jnp.asarray(ids, jnp.int32), layout)
    return np.asarray(logits)


def golden(folder: Path):
    return np.load(folder / "golden.npz")


@pytest.mark.parametrize("name", HF)
def test_logits_at_every_position(name):
    folder = FIXTURES / "models" / name
    want = golden(folder)
    prompt = int(want["all_logits_prompt"])
    for i, length in enumerate(want["lengths"]):
        got = whole_prompt_logits(folder, want["input_ids"][i, :length])
        np.testing.assert_allclose(got[-1], want["last_logits"][i], atol=TOLERANCE, rtol=0)
        if i == prompt:
            np.testing.assert_allclose(got, want["all_logits"][:length], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("name", ["llama_untied", "llama_tied_bias_llama3"])
@pytest.mark.parametrize("change", [{"kernels": REFERENCE}, {"stacked": True}, {"weights": "packed"}], ids=str)
def test_other_ways_to_run_give_the_same_logits(name, change):
    folder = FIXTURES / "models" / name
    want = golden(folder)
    prompt = int(want["all_logits_prompt"])
    length = int(want["lengths"][prompt])
    got = whole_prompt_logits(folder, want["input_ids"][prompt, :length], **change)
    np.testing.assert_allclose(got, want["all_logits"][:length], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("weights", ["expanded", "packed"])
def test_gguf_of_every_legacy_format(weights):
    """Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, F16, BF16 and F32 in one file, expanded at load and computed packed."""
    folder = FIXTURES / "gguf" / "gguf_llama_legacy"
    want = golden(folder)
    prompt = int(want["all_logits_prompt"])
    length = int(want["lengths"][prompt])
    got = whole_prompt_logits(folder / "model.gguf", want["input_ids"][prompt, :length], weights=weights)
    np.testing.assert_allclose(got, want["all_logits"][:length], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("name", ["llama_untied", "llama_yarn"])
def test_greedy_ids_through_the_engine(name):
    """Three prompts side by side, 24 tokens each, compared up to the reference's first margin below 1e-3."""
    folder = FIXTURES / "models" / name
    want = golden(folder)
    prompts = [want["input_ids"][i, :n].tolist() for i, n in enumerate(want["lengths"])]
    options: dict[str, Any] = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "num_pages": 64, "page_size": 16}
    cache = Path(os.environ["JAX_COMPILATION_CACHE_DIR"])
    with LLM(str(folder), compilation_cache_dir=cache, **options) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
        results = llm.generate([{"prompt_token_ids": p} for p in prompts], params)
    for result, ids, margins in zip(results, want["greedy_ids"], want["greedy_margin"], strict=True):
        close = int(np.argmax(margins < 1e-3)) if (margins < 1e-3).any() else len(ids)
        assert close >= 8
        assert result.outputs[0].token_ids[:close] == ids[:close].tolist()


def test_options_of_the_engine_are_those_of_llm():
    assert {"model", "max_model_len", "max_num_seqs", "page_size", "kv_cache_dtype", "seed"} <= EngineConfig.names()
