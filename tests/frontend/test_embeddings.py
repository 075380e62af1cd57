"""`LLM.embed` and `submit_embedding` over a scripted engine: one vector for each prompt, beside generations."""

import pytest
from readers import read
from scripted import ScriptedExecutor, hashed_token

from jaxserve import offline
from jaxserve.errors import InvalidRequest, JaxserveError, PromptTooLong
from jaxserve.offline import LLM
from jaxserve.sampling_params import SamplingParams


@pytest.fixture
def llm(frontend_over, monkeypatch) -> LLM:
    frontend = frontend_over(ScriptedExecutor(), max_open=1000, max_num_batched_tokens=16)
    frontend.embedding_size = 2
    monkeypatch.setattr(offline, "start_frontend", lambda *args, **options: frontend)
    return LLM("scripted")


def values(results) -> list[list[float]]:
    return [result.outputs.embedding for result in results]


def test_prompts_of_every_kind_in_order(llm):
    """The scripted states are [position, 1] of each token; 40 tokens take three steps."""
    prompts = ["hel", [1, 2, 3], {"prompt_token_ids": [4] * 40, "cache_salt": "a"}]
    results = llm.embed(prompts, normalize=False)
    assert values(results) == [[0.5, 1.0], [1.0, 1.0], [19.5, 1.0]]
    assert [result.prompt_token_ids for result in results] == [[258, 257], [1, 2, 3], [4] * 40]
    assert all(result.finished for result in results)
    assert values(llm.embed(prompts, pooling="last", normalize=False)) == [[1.0, 1.0], [2.0, 1.0], [39.0, 1.0]]


def test_more_prompts_than_slots_and_pages(llm):
    prompts = [[n % 250] * (1 + n % 60) for n in range(80)]
    assert values(llm.embed(prompts, normalize=False)) == [[(len(p) - 1) / 2, 1.0] for p in prompts]
    assert llm.get_metrics().running_pages == 0


def test_vectors_are_scaled_and_cut(llm):
    assert values(llm.embed([1, 2, 3, 4, 5, 6, 7])) == [pytest.approx([3 / 10**0.5, 1 / 10**0.5])]
    assert values(llm.embed([1, 2, 3], dimensions=1)) == [[1.0]]


def test_an_embedding_counts_no_generated_token_and_reads_no_cache(llm):
    llm.generate([[1, 2, 3, 4, 5, 6]], SamplingParams(max_tokens=2))
    before = llm.get_metrics()
    assert values(llm.embed([1, 2, 3, 4, 5, 6], normalize=False)) == [[2.5, 1.0]]
    after = llm.get_metrics()
    assert after.generation_tokens_total == before.generation_tokens_total
    assert after.prefix_hit_tokens_total == before.prefix_hit_tokens_total
    assert after.prompt_tokens_total == before.prompt_tokens_total + 6
    assert after.requests_finished_total["stop"] == before.requests_finished_total["stop"] + 1


def test_generations_beside_embeddings_are_what_they_are_alone(llm):
    generations = [llm.frontend.submit([n], SamplingParams(max_tokens=6, ignore_eos=True)) for n in range(4)]
    found = values(llm.embed([[9] * n for n in range(1, 20)], normalize=False))
    assert found == [[(n - 1) / 2, 1.0] for n in range(1, 20)]
    for n, generation in enumerate(generations):
        ids = [token for delta in read(generation) for token in delta.token_ids]
        assert ids == [hashed_token([n], 0, i) for i in range(6)]


def test_unseeded_requests_draw_the_same_whether_or_not_something_was_embedded(llm):
    """Their seeds come from the order of requests, which embeddings take no place in."""
    engine = llm.frontend.engine
    llm.embed([[1], [2]])
    params = SamplingParams()
    first = engine.request("a", [1], params, max_tokens=1, eos_token_ids=frozenset()).payload.seed
    llm.embed([[1], [2]])
    second = engine.request("b", [1], params, max_tokens=1, eos_token_ids=frozenset()).payload.seed
    from jaxserve.engine.requests import fresh_seed

    assert [first, second] == [fresh_seed(0, 0), fresh_seed(0, 1)]


@pytest.mark.parametrize(
    ("prompts", "options", "error", "said"),
    [
        ([[1], []], {}, InvalidRequest, "no tokens"),
        ([[1], [2] * 100], {}, PromptTooLong, "prompt has 100 tokens"),
        ([[1], [999]], {}, InvalidRequest, "token id 999"),
        ([[1]], {"dimensions": 3}, InvalidRequest, "dimensions must be from 1 to 2"),
        ([[1]], {"dimensions": 0}, InvalidRequest, "dimensions must be an integer of at least 1"),
    ],
)
def test_what_cannot_be_embedded(llm, prompts, options, error, said):
    with pytest.raises(error, match=said):
        llm.embed(prompts, **options)
    assert values(llm.embed([7], normalize=False)) == [[0.0, 1.0]]


def test_a_vector_that_is_not_finite_is_an_error(llm, monkeypatch):
    monkeypatch.setattr("jaxserve.engine.pooling.PooledPrompt.vector", lambda self: [float("nan"), 1.0])
    with pytest.raises(JaxserveError, match="no finite values"):
        llm.embed([7])
