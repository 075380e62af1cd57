"""Embeddings equal the pooled hidden states of the plain forward pass, however the prompt was run."""

import jax.numpy as jnp
import numpy as np
import pytest
from engines import add, alone, engine_over, finish, random_prompt

from jaxserve.engine.pooling import POOLS_LAST, POOLS_NOTHING, POOLS_SUM, PooledPrompt, pooled_states
from jaxserve.engine.requests import EmbeddingEvent
from jaxserve.kv_cache import cache_spec, empty_cache
from jaxserve.pooling_params import Pooling
from jaxserve.sampling_params import SamplingParams
from pallas_kernels.ragged import RaggedLayout

ONE = SamplingParams(temperature=0.0, max_tokens=1, seed=0, ignore_eos=True, detokenize=False)
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=0)
POOLINGS: tuple[Pooling, ...] = ("mean", "last")


def layout_of(lengths: list[int], num_singles: int) -> RaggedLayout:
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    return RaggedLayout(
        kv_lengths=jnp.asarray(lengths, jnp.int32),
        query_starts=jnp.asarray(starts),
        page_table=jnp.zeros((len(lengths), 1), jnp.int32),
        num_single_rows=num_singles,
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_pool_their_own_tokens(dtype):
    hidden = jnp.asarray(np.random.default_rng(0).normal(size=(12, 3)), dtype)
    layout = layout_of([1, 1, 4, 3, 0], 2)
    codes = jnp.asarray([POOLS_SUM, POOLS_NOTHING, POOLS_SUM, POOLS_LAST, POOLS_NOTHING], jnp.int32)
    got = np.asarray(pooled_states(hidden, layout, codes))
    rows = np.asarray(hidden, np.float32)
    assert got.dtype == np.float32
    np.testing.assert_array_equal(got[0], rows[0])
    np.testing.assert_allclose(got[2], rows[2:6].sum(axis=0), rtol=1e-6)
    np.testing.assert_array_equal(got[3], rows[8])


def test_a_neighbours_nan_stays_with_it():
    hidden = jnp.ones((9, 2)).at[0].set(jnp.nan).at[5:].set(jnp.inf)
    codes = jnp.asarray([POOLS_SUM, POOLS_SUM, POOLS_SUM, POOLS_SUM], jnp.int32)
    got = np.asarray(pooled_states(hidden, layout_of([1, 1, 3, 2], 2), codes))
    assert got[1:3].tolist() == [[1, 1], [3, 3]]
    assert np.isnan(got[0]).all()


def test_nothing_is_computed_where_nobody_asks():
    hidden = jnp.full((6, 2), jnp.nan)
    assert not np.asarray(pooled_states(hidden, layout_of([1, 1, 4], 2), jnp.zeros(3, jnp.int32))).any()


def test_a_prompt_that_starts_anew_forgets_what_it_had():
    for pooling, want in zip(POOLINGS, ([3.0], [4.0]), strict=True):
        prompt = PooledPrompt(pooling=pooling)
        prompt.add(np.asarray([100.0], np.float32), 0, 2)
        prompt.add(np.asarray([8.0], np.float32), 0, 3)
        prompt.add(np.asarray([4.0], np.float32), 3, 1)
        assert prompt.vector() == want


def direct(built, prompt: list[int], pooling: Pooling) -> np.ndarray:
    """Pooled hidden states of one whole prompt, from the model's forward pass and numpy."""
    program, pages = built.executor.program, -(-len(prompt) // built.page_size)
    spec = cache_spec(program.config, built.page_size, program.dtype)
    layout = RaggedLayout(
        kv_lengths=jnp.asarray([len(prompt)], jnp.int32),
        query_starts=jnp.asarray([0, len(prompt)], jnp.int32),
        page_table=jnp.arange(pages, dtype=jnp.int32)[None],
        num_single_rows=0,
    )
    hidden, *_ = program.model.forward(
        built.executor.params,
        program.config,
        program.kernels,
        jnp.asarray(prompt, jnp.int32),
        layout,
        empty_cache(spec, pages, program.kernels),
        dtype=program.dtype,
    )
    states = np.asarray(hidden, np.float64)
    return states.mean(axis=0) if pooling == "mean" else states[-1]


def embed(engine, request_id: str, prompt: list[int], pooling: Pooling) -> None:
    add(engine, request_id, prompt, ONE, pooling=pooling)


def vectors(engine) -> dict[str, list[float]]:
    """Steps until nothing is left: the vectors, by request."""
    found = {}
    while engine.has_work:
        for event in engine.step():
            if isinstance(event, EmbeddingEvent):
                assert (event.token_ids, event.finish_reason) == ((), "stop")
                found[event.request_id] = event.pooled
        engine.scheduler.check_invariants()
    return found


@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("length", [1, 2, 21, 64, 65, 150])
def test_embeddings_equal_the_plain_forward_pass(tiny, length, pooling):
    """Steps hold 64 tokens: the longer prompts come in chunks, the last of them of one token at 65."""
    prompt = random_prompt(length, tiny.loaded.config.vocab_size, length)
    engine = engine_over(tiny)
    embed(engine, "e", prompt, pooling)
    got = vectors(engine)["e"]
    np.testing.assert_allclose(got, direct(tiny, prompt, pooling), atol=2e-5)  # float32, attention in other blocks
    assert engine.num_generated_tokens == 0


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("chunk", [1, 7])
def test_chunks_of_any_size_and_cached_prefixes(tiny, chunk, overlap):
    """The prompt is in the prefix cache already, which holds no hidden states and so may not be read."""
    prompt = random_prompt(50, tiny.loaded.config.vocab_size, 3)
    engine = engine_over(tiny, overlap=overlap, max_prefill_chunk=chunk)
    add(engine, "first", prompt, GREEDY)
    finish(engine)
    for pooling in POOLINGS:
        embed(engine, pooling, prompt, pooling)
    got = vectors(engine)
    for pooling in POOLINGS:
        np.testing.assert_allclose(got[pooling], direct(tiny, prompt, pooling), atol=2e-5)


def test_embeddings_and_generations_share_steps_and_leave_each_other_alone(tiny):
    vocab = tiny.loaded.config.vocab_size
    sampled = SamplingParams(temperature=0.9, seed=7, max_tokens=12, ignore_eos=True, repetition_penalty=1.2)
    generations = {f"g{i}": (random_prompt(9 + 17 * i, vocab, 30 + i), (GREEDY, sampled)[i % 2]) for i in range(4)}
    inputs: dict[str, tuple[list[int], Pooling]] = {
        f"e{i}": (random_prompt(1 + 23 * i, vocab, 50 + i), POOLINGS[i % 2]) for i in range(6)
    }
    want = {name: alone(tiny, prompt, params).token_ids for name, (prompt, params) in generations.items()}
    engine = engine_over(tiny)
    found: dict[str, list[float]] = {}
    tokens: dict[str, list[int]] = {name: [] for name in generations}

    def step() -> None:
        for event in engine.step():
            tokens.get(event.request_id, []).extend(event.token_ids)
            if isinstance(event, EmbeddingEvent):
                found[event.request_id] = event.pooled

    for (name, (prompt, params)), (other, (text, pooling)) in zip(generations.items(), inputs.items(), strict=False):
        add(engine, name, prompt, params)
        embed(engine, other, text, pooling)
        step()
    for name in ("e4", "e5"):
        embed(engine, name, *inputs[name])
    while engine.has_work:
        step()
    assert tokens == want
    for name, (prompt, pooling) in inputs.items():
        np.testing.assert_allclose(found[name], direct(tiny, prompt, pooling), atol=2e-5)
    assert engine.num_generated_tokens == sum(map(len, want.values()))
    assert engine.scheduler.stats().num_running_pages == 0


def test_a_preempted_prompt_is_pooled_anew(tiny):
    """Pages for two of four sequences. Prompts in many chunks are preempted in their middle."""
    vocab = tiny.loaded.config.vocab_size
    inputs: dict[str, tuple[list[int], Pooling]] = {
        str(i): (random_prompt(90 + i, vocab, 70 + i), POOLINGS[i % 2]) for i in range(3)
    }
    engine = engine_over(tiny, num_pages=9, enable_prefix_caching=False, max_prefill_chunk=8)
    decoding = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    add(engine, "old", random_prompt(20, vocab, 9), decoding)
    for name, (prompt, pooling) in inputs.items():
        embed(engine, name, prompt, pooling)
    for _ in range(6):
        engine.step()
    urgent = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    add(engine, "urgent", random_prompt(60, vocab, 8), urgent, priority=-1)
    found = vectors(engine)
    assert engine.scheduler.stats().num_preemptions > 0
    for name, (prompt, pooling) in inputs.items():
        np.testing.assert_allclose(found[name], direct(tiny, prompt, pooling), atol=2e-5)


def test_an_aborted_embedding_says_nothing(tiny):
    engine = engine_over(tiny)
    embed(engine, "e", random_prompt(150, tiny.loaded.config.vocab_size, 4), "mean")
    engine.step()
    assert engine.abort("e")
    assert vectors(engine) == {}
