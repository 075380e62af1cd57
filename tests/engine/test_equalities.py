"""How a request is run must not show in what it gives, on a tiny and on a real model."""

import pytest
from engines import add, alone, engine_over, finish, note, random_prompt

from jaxserve.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=0)
SEEDED = SamplingParams(temperature=0.9, top_p=0.95, top_k=40, seed=7, max_tokens=8, ignore_eos=True, logprobs=0)
PENALIZED = SamplingParams(
    temperature=0.8,
    seed=3,
    max_tokens=8,
    ignore_eos=True,
    logprobs=0,
    repetition_penalty=1.3,
    presence_penalty=0.5,
    frequency_penalty=0.2,
    logit_bias={5: 2.0, 9: -100.0},
)


def case(model: str, name: str, *marks: pytest.MarkDecorator):
    params = {"greedy": GREEDY, "seeded": SEEDED, "penalized": PENALIZED}[name]
    return pytest.param(model, params, marks=marks, id=f"{model}-{name}")


ALL_PARAMS = pytest.mark.parametrize(
    ("built", "params"),
    [
        case("tiny", "greedy"),
        case("tiny", "seeded"),
        case("tiny", "penalized"),
        case("real", "penalized"),
        case("real", "greedy", pytest.mark.slow),
        case("real", "seeded", pytest.mark.slow),
    ],
    indirect=["built"],
)
ONE_EACH = pytest.mark.parametrize("built", ["tiny", "real"], indirect=True)


def vocab_of(built) -> int:
    return built.loaded.config.vocab_size


@ALL_PARAMS
def test_batched_equals_alone_bit_for_bit(built, params):
    """Deterministic mode among 16 random neighbours: the same tokens, and on the real model the same bits.

    The tiny model's heads of 16 are below the widths at which XLA:CPU sums in one order; its last bit may move.
    """
    prompt = random_prompt(21, vocab_of(built), 1)
    want = alone(built, prompt, params)
    engine = engine_over(built)
    for i in range(8):
        other = SamplingParams(temperature=0.1 * i, seed=i, max_tokens=3 + 2 * i, ignore_eos=True)
        add(engine, f"before{i}", random_prompt(5 + 11 * i, vocab_of(built), 100 + i), other)
    outcomes = {}
    for _ in range(3):
        for event in engine.step():
            note(outcomes, event)
    add(engine, "r", prompt, params)
    for i in range(8):
        other = SamplingParams(temperature=1.0, top_p=0.5, repetition_penalty=1.1, max_tokens=9, ignore_eos=True)
        add(engine, f"after{i}", random_prompt(3 + 7 * i, vocab_of(built), 200 + i), other)
    got = finish(engine, outcomes)["r"]
    assert got.token_ids == want.token_ids
    if built.loaded.config.head_size == 16:
        assert got.logprobs == pytest.approx(want.logprobs, abs=5e-6)
    else:
        assert got.logprobs == want.logprobs


@pytest.mark.parametrize("chunk", [1, 7, 64])
@ALL_PARAMS
def test_chunked_equals_whole(built, params, chunk):
    prompt = random_prompt(50, vocab_of(built), 2)
    want = alone(built, prompt, params)
    got = alone(built, prompt, params, max_prefill_chunk=chunk)
    assert got.token_ids == want.token_ids
    assert got.logprobs == pytest.approx(want.logprobs, abs=1e-4)  # float32: keys meet in blocks either way


@pytest.mark.parametrize("extra", [-1, 0, 1, 9])
@ALL_PARAMS
def test_prefix_hit_equals_miss(built, params, extra):
    """Shared prefixes of k pages and a token around it, and a prompt that is cached as a whole."""
    size = built.page_size
    shared = random_prompt(3 * size + extra, vocab_of(built), 3)
    prompt = shared + random_prompt(5, vocab_of(built), 4)
    want = alone(built, prompt, params)
    engine = engine_over(built)
    add(engine, "first", shared, GREEDY)
    finish(engine)
    add(engine, "r", prompt, params)
    add(engine, "other salt", prompt, params, cache_domain=("v", "", "other"))
    outcomes = finish(engine)
    assert outcomes["r"].num_cached_tokens == (3 if extra >= 0 else 2) * size
    assert outcomes["other salt"].num_cached_tokens == 0
    for name in ("r", "other salt"):
        assert outcomes[name].token_ids == want.token_ids
        assert outcomes[name].logprobs == pytest.approx(want.logprobs, abs=1e-4)


@ALL_PARAMS
def test_a_fully_cached_prompt_equals_a_miss(built, params):
    prompt = random_prompt(2 * built.page_size, vocab_of(built), 5)
    want = alone(built, prompt, params)
    engine = engine_over(built)
    for name in ("first", "second"):
        add(engine, name, prompt, params)
        outcome = finish(engine)[name]
        assert outcome.token_ids == want.token_ids
        assert outcome.logprobs == pytest.approx(want.logprobs, abs=1e-4)
    assert outcome.num_cached_tokens == built.page_size


@ALL_PARAMS
def test_preempted_equals_undisturbed(built, params):
    """Pages for two of four sequences: the others are preempted and recomputed."""
    prompts = [random_prompt(30 + i, vocab_of(built), 10 + i) for i in range(4)]
    wants = [alone(built, prompt, params) for prompt in prompts]
    engine = engine_over(built, num_pages=7, enable_prefix_caching=False)
    for i, prompt in enumerate(prompts):
        add(engine, str(i), prompt, params)
    outcomes = finish(engine)
    assert engine.scheduler.stats().num_preemptions > 0
    for i, want in enumerate(wants):
        assert outcomes[str(i)].token_ids == want.token_ids
        assert outcomes[str(i)].logprobs == pytest.approx(want.logprobs, abs=1e-4)


@ALL_PARAMS
def test_overlap_on_equals_off(built, params):
    runs = []
    for overlap in (False, True):
        engine = engine_over(built, overlap=overlap)
        for i in range(5):
            add(engine, str(i), random_prompt(9 * i + 2, vocab_of(built), 20 + i), params)
        runs.append(finish(engine))
    for name, outcome in runs[0].items():
        assert runs[1][name].token_ids == outcome.token_ids
        assert runs[1][name].finish_reason == outcome.finish_reason == "length"


@ONE_EACH
def test_a_later_abort_leaves_the_others_alone(built):
    prompts = [random_prompt(20 + i, vocab_of(built), 40 + i) for i in range(3)]
    want = alone(built, prompts[2], SEEDED)
    engine = engine_over(built)
    for i, prompt in enumerate(prompts):
        add(engine, str(i), prompt, SEEDED)
    outcomes = {}
    for step in range(6):
        for event in engine.step():
            note(outcomes, event)
        if step in (1, 4):
            assert engine.abort(str(step // 4))
    assert finish(engine, outcomes)["2"].token_ids == want.token_ids
    stats = engine.scheduler.stats()
    assert stats.num_running_pages == 0
    assert stats.num_free_pages + stats.num_cached_pages == stats.num_total_pages


@ONE_EACH
def test_seeds_differ_and_repeat(built):
    prompt = random_prompt(12, vocab_of(built), 60)
    params = [SamplingParams(temperature=1.0, seed=s, max_tokens=16, ignore_eos=True) for s in (1, 2, 1)]
    first, second, third = (alone(built, prompt, p).token_ids for p in params)
    assert first == third != second
