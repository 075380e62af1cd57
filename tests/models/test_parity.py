"""Every family against logits, greedy ids and router choices of independent implementations (transformers, float32).

The README's table of supported models is made from the cases of this file.
"""

import jax
import numpy as np
import pytest
from parity import (
    FIXTURES,
    TOLERANCE,
    assert_decode_parity,
    assert_greedy_parity,
    assert_last_logits_parity,
    assert_parity,
    golden,
    whole_prompt_logits,
)

from jaxserve.layers import moe
from pallas_kernels.kernels import REFERENCE

MODELS = sorted(folder.name for folder in (FIXTURES / "models").iterdir())
WITH_EXPERTS = [name for name in MODELS if "router_layers" in golden(FIXTURES / "models" / name)]
GGUF_FILES = ["gguf_deepseek2", "gguf_gpt_oss", "gguf_llama_kquants", "gguf_llama_legacy", "gguf_qwen3"]


def test_all_fixtures_are_here():
    assert len(MODELS) == 21
    assert len(WITH_EXPERTS) == 9


@pytest.mark.parametrize("name", MODELS)
def test_logits_at_every_position_of_a_whole_prompt(name):
    assert_parity(FIXTURES / "models" / name)


@pytest.mark.parametrize("name", MODELS)
def test_logits_of_tokens_decoded_one_by_one(name):
    assert_decode_parity(FIXTURES / "models" / name)


@pytest.mark.parametrize("name", sorted({*MODELS} - {*WITH_EXPERTS}))
def test_logits_behind_every_prompt(name):
    assert_last_logits_parity(FIXTURES / "models" / name)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted({*MODELS} - {"llama_dynamic", "phi3_longrope"}))
def test_greedy_ids_through_the_engine(name):
    assert_greedy_parity(FIXTURES / "models" / name)


@pytest.mark.slow
@pytest.mark.parametrize(("context", "at_least"), [(96, 0), (512, 97)], ids=["short", "long"])
def test_greedy_ids_of_longrope_in_engines_of_either_context(context, at_least):
    """The reference takes the long factors once a sequence is long, an engine when one may become long."""
    assert_greedy_parity(FIXTURES / "models" / "phi3_longrope", context, at_least)


def test_greedy_ids_of_a_dynamic_rope_within_the_trained_context():
    """Beyond it the reference turns all keys anew at each step, which no cache of rotated keys can follow."""
    assert_greedy_parity(FIXTURES / "models" / "llama_dynamic", context=64)


@pytest.mark.parametrize("name", ["deepseek_v3", "gpt_oss", "qwen2_moe"])
def test_layers_of_different_forms_can_be_scanned(name):
    assert_parity(FIXTURES / "models" / name, stacked=True)


@pytest.mark.parametrize("name", ["deepseek_v3", "gpt_oss"])
def test_logits_by_the_reference_kernels(name):
    assert_parity(FIXTURES / "models" / name, kernels=REFERENCE)


@pytest.mark.parametrize("weights", ["expanded", "packed"])
@pytest.mark.parametrize("name", GGUF_FILES)
def test_logits_of_a_gguf(name, weights):
    folder = FIXTURES / "gguf" / name
    assert_parity(folder, folder / "model.gguf", weights=weights)


@pytest.mark.parametrize("name", WITH_EXPERTS)
def test_the_router_chooses_and_weighs_as_the_reference_behind_every_prompt(name, monkeypatch):
    """Experts of tokens whose choice is not within rounding of another, and the weights of their outputs."""
    chosen = []
    route = moe.route

    def recorded(*args):
        found = route(*args)
        jax.debug.callback(lambda *some: chosen.append([np.asarray(a) for a in some]), *found, ordered=True)
        return found

    monkeypatch.setattr(moe, "route", recorded)
    want = golden(FIXTURES / "models" / name)
    for prompt, length in enumerate(want["lengths"]):
        chosen.clear()
        logits = whole_prompt_logits(FIXTURES / "models" / name, want["input_ids"][prompt, :length])
        np.testing.assert_allclose(logits[-1], want["last_logits"][prompt], atol=TOLERANCE, rtol=0)
        jax.effects_barrier()
        assert len(chosen) == len(want["router_layers"])
        for layer, (experts, weights) in enumerate(chosen):
            order = np.argsort(experts, axis=1)
            sure = np.abs(want[f"router_gap_{prompt}"][layer]) >= 1e-4
            assert sure.any()
            experts, weights = (np.take_along_axis(a, order, axis=1)[sure] for a in (experts, weights))
            np.testing.assert_array_equal(experts, want[f"router_ids_{prompt}"][layer][sure])
            np.testing.assert_allclose(weights, want[f"router_weights_{prompt}"][layer][sure], atol=1e-5)
