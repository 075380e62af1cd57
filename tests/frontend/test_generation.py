"""Choices, log probabilities and what else a generation carries to its reader."""

import asyncio
import math
from typing import Any

import pytest
from readers import ends_of, read, read_async, text_of, tokens_of, wait_until
from scripted import ScriptedExecutor, hashed_token, says

from jaxserve.engine.requests import TopTokens
from jaxserve.frontend.choice_text import logprob_entry
from jaxserve.outputs import Logprob
from jaxserve.sampling_params import SamplingParams

PROMPT = [72, 73, 74, 75, 76]


@pytest.mark.parametrize("reader", [read, read_async])
def test_choices_arrive_under_their_index(frontend_over, reader):
    frontend = frontend_over(ScriptedExecutor())
    generation = frontend.submit(PROMPT, SamplingParams(n=3, max_tokens=6))
    deltas = reader(generation)
    for index in range(3):
        assert tokens_of(deltas, index) == [hashed_token(PROMPT, index, n) for n in range(6)]
    assert ends_of(deltas) == {0: "length", 1: "length", 2: "length"}
    assert generation.num_choices == 3
    assert frontend.stats().requests_finished_total["length"] == 3


def test_choices_of_one_request_and_requests_have_seeds_of_their_own(frontend_over):
    frontend = frontend_over(executor := ScriptedExecutor())
    for seed in (5, None, None):
        read(frontend.submit(PROMPT, SamplingParams(n=3, max_tokens=2, seed=seed)))
    seeds = {r.request_id: getattr(r.payload, "seed", None) for plan in executor.plans for r in plan.requests}
    assert len(set(seeds.values())) == 9
    assert seeds["req-0/0"] == 5


def texts(tokenizer, ids):
    return [tokenizer.token_text(token) for token in ids]


def test_logprobs_have_the_chosen_token_first_then_alternatives_by_rank(frontend_over, tokenizer):
    frontend = frontend_over(ScriptedExecutor(says([65, 66])))
    deltas = read(frontend.submit(PROMPT, SamplingParams(logprobs=2, max_tokens=2)))
    entries = [entry for delta in deltas for entry in delta.logprobs or ()]
    assert [list(entry) for entry in entries] == [[65, 66, 67], [66, 67, 68]]
    assert [entry.logprob for entry in entries[0].values()] == pytest.approx([-0.65, 0.0, -0.1])
    assert [entry.rank for entry in entries[0].values()] == [3, 1, 2]
    assert [entry.decoded_token for entry in entries[0].values()] == texts(tokenizer, [65, 66, 67])
    assert [len(delta.logprobs or ()) for delta in deltas] == [len(delta.token_ids) for delta in deltas]


def test_zero_logprobs_is_the_chosen_token_only_and_none_is_none(frontend_over):
    frontend = frontend_over(ScriptedExecutor(says([65, 66])))
    zero = frontend.submit(PROMPT, SamplingParams(logprobs=0, max_tokens=2))
    none = frontend.submit(PROMPT, SamplingParams(max_tokens=2))
    assert [list(entry) for delta in read(zero) for entry in delta.logprobs or ()] == [[65], [66]]
    assert all(delta.logprobs is None for delta in read(none))


def test_a_logprob_entry_leaves_out_what_is_not_there_and_counts_the_chosen_token_once(tokenizer):
    top = TopTokens(66, -1.5, 2, [65, 66, -1], [-0.5, -1.5, -math.inf])
    a, b = texts(tokenizer, [65, 66])
    assert list(logprob_entry(top, tokenizer).items()) == [(66, Logprob(-1.5, 2, b)), (65, Logprob(-0.5, 1, a))]
    assert logprob_entry(top, None)[65].decoded_token is None


def test_alternatives_beyond_the_tokenizer_have_no_text(tokenizer):
    """Embeddings are padded: models give probability to ids that no tokenizer knows."""
    padding = tokenizer.vocab_size
    entry = logprob_entry(TopTokens(65, -0.1, 1, [65, padding], [-0.1, -2.0]), tokenizer)
    assert entry[padding] == Logprob(-2.0, 2, None)


@pytest.mark.parametrize("chunk", [1, 2, 64])
def test_prompt_logprobs_are_there_with_the_first_delta(frontend_over, chunk):
    frontend = frontend_over(ScriptedExecutor(), max_prefill_chunk=chunk)
    read(frontend.submit(PROMPT, SamplingParams(max_tokens=1)))  # cached prefixes must not be used for the next
    generation = frontend.submit(PROMPT, SamplingParams(max_tokens=3, prompt_logprobs=1, n=2))
    assert generation.prompt_logprobs is None
    deltas = iter(generation)
    next(deltas)
    if generation.prompt_logprobs is None:  # the first delta was that of another choice
        list(deltas)
    found: Any = generation.prompt_logprobs
    assert found[0] is None
    assert [list(entry) for entry in found[1:]] == [[token, token + 1] for token in PROMPT[1:]]
    assert [entry[token].logprob for entry, token in zip(found[1:], PROMPT[1:], strict=True)] == pytest.approx(
        [-token / 100 for token in PROMPT[1:]]
    )
    assert found[1][73].rank == 3
    list(deltas)


def test_a_cached_prefix_is_reported(frontend_over):
    frontend = frontend_over(ScriptedExecutor())
    for want, salt in ((0, None), (4, None), (0, "mine"), (4, "mine")):
        generation = frontend.submit(PROMPT, SamplingParams(max_tokens=2), cache_salt=salt)
        read(generation)
        assert generation.num_cached_tokens == want
    stats = frontend.stats()
    assert (stats.prefix_queried_tokens_total, stats.prefix_hit_tokens_total) == (20, 8)


def test_max_tokens_none_fills_the_model(frontend_over):
    frontend = frontend_over(ScriptedExecutor(), max_model_len=20)
    deltas = read(frontend.submit(PROMPT, SamplingParams(max_tokens=None)))
    assert len(tokens_of(deltas)) == 15
    assert ends_of(deltas) == {0: "length"}


def test_the_prompt_is_the_callers_own(frontend_over):
    frontend = frontend_over(executor := ScriptedExecutor())
    executor.gate.clear()
    prompt = list(PROMPT)
    generation = frontend.submit(prompt, SamplingParams(max_tokens=3))
    prompt.clear()
    executor.gate.set()
    assert tokens_of(read(generation)) == [hashed_token(PROMPT, 0, n) for n in range(3)]
    assert generation.prompt_token_ids == PROMPT


def test_a_generation_that_was_read_has_nothing_left(frontend_over):
    generation = frontend_over(ScriptedExecutor()).submit(PROMPT, SamplingParams(max_tokens=2))
    assert read(generation)
    assert read(generation) == read_async(generation) == []


def test_an_event_loop_serves_many_streams_at_once(frontend_over):
    frontend = frontend_over(ScriptedExecutor())
    prompts = [[n, n + 1] for n in range(40)]

    async def one(prompt: list[int]) -> list[int]:
        generation = frontend.submit(prompt, SamplingParams(max_tokens=5))
        return tokens_of([delta async for delta in generation])

    async def all_of_them() -> list[list[int]]:
        return await asyncio.wait_for(asyncio.gather(*map(one, prompts)), 30)

    results = asyncio.run(all_of_them())
    assert results == [[hashed_token(prompt, 0, n) for n in range(5)] for prompt in prompts]


def test_a_reader_whose_loop_is_closed_harms_nobody(frontend_over):
    frontend = frontend_over(executor := ScriptedExecutor(), max_num_seqs=2)
    executor.gate.clear()
    left = frontend.submit(PROMPT, SamplingParams(max_tokens=20))

    async def begin() -> None:
        reader = left.__aiter__()
        waiting = asyncio.ensure_future(anext(reader))
        await asyncio.sleep(0)
        assert left.reader is not None
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        await reader.aclose()

    asyncio.run(begin())
    executor.gate.set()
    assert tokens_of(read(frontend.submit([80, 81], SamplingParams(max_tokens=20))))
    wait_until(lambda: frontend.stats().requests_finished_total["length"] == 2)
    assert frontend.is_ready
    assert text_of(read(left))  # what was delivered can still be read
