"""Mistral's sliding window (32 tokens, on every layer): what is generated does not depend on what becomes of pages."""

import os
from pathlib import Path
from typing import Any

import pytest
from engines import add, alone, engine_over, finish, note, random_prompt

from jaxserve.config import EngineConfig
from jaxserve.engine.build import build_engine
from jaxserve.engine.progress import Silent
from jaxserve.errors import ConfigError
from jaxserve.sampling_params import SamplingParams
from jaxserve.scheduler.page_need import page_need

MODELS = Path(__file__).resolve().parent.parent / "fixtures" / "models"
WINDOW, VOCAB, MAX_LEN = 32, 256, 320
GREEDY = SamplingParams(temperature=0.0, max_tokens=80, ignore_eos=True, logprobs=0)
SEEDED = SamplingParams(temperature=0.9, top_p=0.95, seed=7, max_tokens=80, ignore_eos=True, logprobs=0)


def build(model="mistral_swa", **options):
    sizes: dict[str, Any] = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": MAX_LEN}
    cache = Path(os.environ["JAX_COMPILATION_CACHE_DIR"])
    config = EngineConfig(model=model, deterministic=True, compilation_cache_dir=cache, **(sizes | options))
    return build_engine(config, MODELS / model, frozenset(), Silent(), warm_up=False)


@pytest.fixture(scope="module")
def swa():
    built = build()
    yield built
    built.engine.close()


@pytest.fixture(scope="module")
def kept(swa):
    """Four requests, each alone in an engine that frees nothing; (prompts, outcomes by parameters)."""
    prompts = [random_prompt(length, VOCAB, length) for length in (5, 20, 12, 150)]
    found = {}
    for params in (GREEDY, SEEDED):
        wants = [alone(swa, prompt, params, num_pages=20) for prompt in prompts]
        found[params.temperature] = wants
    return prompts, found


@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize(("num_pages", "chunk"), [(44, 64), (44, 7), (7, 64)])
def test_freed_equals_kept(swa, kept, num_pages, chunk, caching, overlap, params):
    """Several windows long, in chunks longer and shorter than the window, beside others, preempted or not."""
    prompts, wants = kept
    engine = engine_over(
        swa,
        overlap=overlap,
        num_pages=num_pages,
        max_prefill_chunk=chunk,
        enable_prefix_caching=caching,
        window=WINDOW,
    )
    for i, prompt in enumerate(prompts):
        add(engine, str(i), prompt, params)
    outcomes = finish(engine)
    stats = engine.scheduler.stats()
    assert stats.num_left_pages >= 20
    assert (stats.num_preemptions > 0) == (num_pages == 7)
    for i, want in enumerate(wants[params.temperature]):
        assert outcomes[str(i)].token_ids == want.token_ids
        assert outcomes[str(i)].logprobs == pytest.approx(want.logprobs, abs=1e-4)


@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_a_hit_on_the_last_window_equals_a_miss(swa, kept, params):
    prompts, wants = kept
    engine = engine_over(swa, num_pages=12, window=WINDOW)
    for name, prompt in (("first", prompts[3]), ("other", random_prompt(70, VOCAB, 0))):
        add(engine, name, prompt, SamplingParams(max_tokens=1))
        finish(engine)
    assert engine.scheduler.stats().num_cached_pages < 150 // 16 + 70 // 16
    add(engine, "again", prompts[3], params)
    outcome = finish(engine)["again"]
    assert outcome.num_cached_tokens == 144
    assert outcome.token_ids == wants[params.temperature][3].token_ids


def test_pages_in_use_stay_bounded(swa):
    """An engine as it is built holds what the window needs, while it generates eight windows."""
    engine, outcomes = swa.engine, {}
    add(engine, "r", random_prompt(20, VOCAB, 1), SamplingParams(max_tokens=280, ignore_eos=True, temperature=0.0))
    most = 0
    while engine.has_work:
        for event in engine.step():
            note(outcomes, event)
        most = max(most, engine.scheduler.stats().num_running_pages)
    assert len(outcomes["r"].token_ids) == 280
    assert most == -(-WINDOW // 16) + 1  # 32 tokens, the one in flight with them, may touch three pages
    assert engine.scheduler.stats().num_left_pages == (299 - WINDOW + 1) // 16


def test_what_is_decided_is_said(swa):
    choice = swa.choices["window"]
    assert (choice.value, choice.reason) == (
        "pages that left the window of 32 tokens are freed",
        "no layer sees further back",
    )
    assert swa.num_pages == 4 * page_need(WINDOW, 16, 64).most < 4 * MAX_LEN // 16
    short = build(max_model_len=32)
    assert (short.choices["window"].value, short.num_pages) == ("all pages are kept", 4 * 2)
    some = build("gpt_oss", max_model_len=48, kernels="xla")
    assert some.choices["window"].value == "all pages are kept"
    assert "layers have no window" in some.choices["window"].reason
    assert "window" not in build("llama_untied", kernels="xla").choices


def test_the_length_is_not_bounded_by_the_pages():
    built = build(num_pages=3, max_num_seqs=1)
    assert built.max_model_len == MAX_LEN
    add(
        built.engine,
        "r",
        random_prompt(200, VOCAB, 1),
        SamplingParams(max_tokens=100, ignore_eos=True, temperature=0.0),
    )
    assert len(finish(built.engine)["r"].token_ids) == 100
    with pytest.raises(ConfigError, match=r"--max-model-len 320 needs 3 KV pages and there are 2 .* lower it to 32 or"):
        build(num_pages=2)
    assert build(num_pages=2, max_model_len=None).max_model_len == 32
