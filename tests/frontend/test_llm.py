"""`LLM` over a scripted engine: prompts of every kind, results in order, and errors for what is no prompt."""

import gc
import runpy
from typing import Any

import pytest
from readers import read, text_of, tokens_of, wait_until
from scripted import EOS, ScriptedExecutor, hashed_token, says

from jaxserve import offline
from jaxserve.errors import ConfigError, EngineDied, InvalidRequest, PromptTooLong
from jaxserve.offline import LLM
from jaxserve.sampling_params import SamplingParams

TEXT = "héllo 🙂, wörld"
FEW = SamplingParams(max_tokens=4)


@pytest.fixture
def llm_over(frontend_over, monkeypatch):
    def make(executor: ScriptedExecutor, **limits) -> LLM:
        frontend = frontend_over(executor, **limits)
        monkeypatch.setattr(offline, "start_frontend", lambda *args, **options: frontend)
        return LLM("scripted")

    return make


@pytest.fixture
def unchecked(llm_over):
    """An LLM without the tests' own type checks, which refuse a wrong type before the code under test sees it."""
    llm = runpy.run_path(offline.__file__)["LLM"].__new__(runpy.run_path(offline.__file__)["LLM"])
    llm.frontend = llm_over(ScriptedExecutor()).frontend
    return llm


def outputs_of(results):
    return [result.outputs[0].token_ids for result in results]


def expected(prompt, count=4, index=0):
    return [hashed_token(prompt, index, n) for n in range(count)]


def test_prompts_of_every_kind(llm_over):
    llm = llm_over(ScriptedExecutor())
    prompts = ["hel", [1, 2, 3], {"prompt": "hel", "cache_salt": "a"}, {"prompt_token_ids": [1, 2, 3]}]
    results = llm.generate(prompts, FEW)
    assert outputs_of(results) == [expected([258, 257]), expected([1, 2, 3])] * 2
    assert [result.prompt for result in results] == ["hel", None, "hel", None]
    assert [result.prompt_token_ids for result in results] == [[258, 257], [1, 2, 3]] * 2
    assert all(result.finished for result in results)


@pytest.mark.parametrize("one", ["hel", [1, 2, 3], {"prompt": "hel"}])
def test_one_prompt_gives_a_list_of_one(llm_over, one):
    assert len(llm_over(ScriptedExecutor()).generate(one, FEW)) == 1


def test_no_prompt_gives_nothing(llm_over):
    assert llm_over(ScriptedExecutor()).generate([], FEW) == []


def test_more_prompts_than_slots_come_back_in_order(llm_over):
    prompts = [[n, n + 1] for n in range(60)]
    llm = llm_over(ScriptedExecutor(), max_open=1000, num_pages=12)
    params = [SamplingParams(max_tokens=1 + n % 7, ignore_eos=True) for n in range(60)]
    results = llm.generate(prompts, params, priority=[n % 3 for n in range(60)])
    assert outputs_of(results) == [expected(prompt, 1 + n % 7) for n, prompt in enumerate(prompts)]


def test_whole_results_equal_the_stream(llm_over, tokenizer):
    script = says(tokenizer.encode(TEXT, add_special=False))
    llm = llm_over(ScriptedExecutor(script))
    cases: list[dict[str, Any]] = [
        {},
        {"stop": "wö"},
        {"stop": ["nothing", "🙂"], "include_stop_str_in_output": True},
        {"n": 2},
    ]
    for changes in cases:
        params = SamplingParams(max_tokens=40, logprobs=1, **changes)
        deltas = read(llm.frontend.submit([1, 2], params))
        result = llm.generate([[1, 2]], params)[0]
        for index, output in enumerate(result.outputs):
            mine = [delta for delta in deltas if delta.index == index]
            assert output.index == index
            assert output.text == text_of(mine, index)
            assert output.token_ids == tokens_of(mine, index)
            assert output.logprobs == [entry for delta in mine for entry in delta.logprobs or ()]
            assert (output.finish_reason, output.stop_reason) == (mine[-1].finish_reason, mine[-1].stop_reason)


def test_without_sampling_params_the_models_defaults_are_used(llm_over):
    llm = llm_over(ScriptedExecutor())
    assert llm.get_default_sampling_params() == SamplingParams()
    llm.frontend.sampling_defaults = {"max_tokens": 3, "temperature": 0.0}
    assert llm.get_default_sampling_params() == SamplingParams(max_tokens=3, temperature=0.0)
    assert outputs_of(llm.generate("hel")) == [expected([258, 257], 3)]
    assert len(llm.generate("hel", SamplingParams())[0].outputs[0].token_ids) == 16


def test_cumulative_logprob_is_the_sum_over_chosen_tokens(llm_over):
    llm = llm_over(ScriptedExecutor(says([10, 20])))
    asked, not_asked = llm.generate([[1], [1]], [SamplingParams(logprobs=2), SamplingParams()])
    assert asked.outputs[0].cumulative_logprob == pytest.approx(-(10 + 20 + EOS) / 100)
    assert [list(entry) for entry in asked.outputs[0].logprobs] == [[10, 11, 12], [20, 21, 22], [EOS, EOS + 1, EOS + 2]]
    assert not_asked.outputs[0].cumulative_logprob is None
    assert not_asked.outputs[0].logprobs is None


def test_prompt_logprobs_and_cached_tokens_are_in_the_result(llm_over):
    llm = llm_over(ScriptedExecutor())
    prompt = [1, 2, 3, 4, 5, 6]
    scored = llm.generate([prompt], SamplingParams(prompt_logprobs=1, max_tokens=1))[0]
    assert scored.prompt_logprobs[0] is None
    assert [list(entry) for entry in scored.prompt_logprobs[1:]] == [[n, n + 1] for n in prompt[1:]]
    again = llm.generate([prompt], FEW)[0]
    assert (again.num_cached_tokens, again.prompt_logprobs) == (4, None)


def test_a_bad_prompt_among_good_ones_leaves_nothing_running(llm_over):
    llm = llm_over(ScriptedExecutor())
    with pytest.raises(PromptTooLong):
        llm.generate([[1, 2], [3] * 200], SamplingParams(max_tokens=50, ignore_eos=True))
    wait_until(lambda: llm.get_metrics().running_pages == 0)
    assert outputs_of(llm.generate([[1, 2]], FEW)) == [expected([1, 2])]


@pytest.mark.parametrize("wrong", [5, None, b"hel", {1, 2}, [None], [5, "a"], [b"hel"], [(1, 2)], object()])
def test_what_is_no_prompt_is_said_so(unchecked, wrong):
    with pytest.raises(InvalidRequest, match="a prompt is text, a list of token ids, or a dict"):
        unchecked.generate(wrong, FEW)


@pytest.mark.parametrize(
    "wrong",
    [{}, {"text": "hel"}, {"prompt": 5}, {"prompt": None}, {"prompt_token_ids": "hel"}, {"prompt_token_ids": 5}],
)
def test_a_prompt_dict_without_a_prompt(unchecked, wrong):
    with pytest.raises(InvalidRequest, match='needs "prompt", a text, or "prompt_token_ids"'):
        unchecked.generate(wrong, FEW)


@pytest.mark.parametrize("wrong", [{"max_tokens": 5}, [None], ["greedy"]])
def test_what_is_no_sampling_params(unchecked, wrong):
    with pytest.raises(InvalidRequest, match="sampling_params must be SamplingParams or a list of them"):
        unchecked.generate(["hel"], wrong)


def test_params_and_priorities_must_match_the_prompts(llm_over):
    llm = llm_over(ScriptedExecutor())
    for params, priority in (([FEW], None), (FEW, [1]), ([FEW] * 3, [1, 2])):
        with pytest.raises(InvalidRequest, match="2 prompts came with"):
            llm.generate(["a", "b"], params, priority=priority)


def test_the_death_of_the_engine_is_raised(llm_over):
    llm = llm_over(executor := ScriptedExecutor())
    executor.failure = RuntimeError("chip on fire")
    for _ in range(2):
        with pytest.raises(EngineDied, match="chip on fire"):
            llm.generate(["a", "b"], FEW)


def test_an_unknown_option_is_refused_with_those_that_exist(llm_over):
    llm_over(ScriptedExecutor())
    with pytest.raises(ConfigError, match=r"LLM\(\) has no option tensor_parallel; it has .*max_model_len"):
        LLM("scripted", tensor_parallel=8)
    with pytest.raises(ConfigError, match="--plan tp8: neither tensor"):
        LLM("scripted", plan="tp8")


def test_close_is_repeatable_and_del_closes(llm_over):
    executor = ScriptedExecutor()
    llm = llm_over(executor)
    llm.close()
    llm.close()
    assert executor.num_closes == 1
    forgotten = llm_over(other := ScriptedExecutor())
    frontend = forgotten.frontend
    del forgotten
    gc.collect()
    assert other.num_closes == 1
    assert not frontend.is_ready
    LLM.__new__(LLM).__del__()  # construction failed: there is nothing to close


def test_an_llm_closes_behind_a_with_block(llm_over):
    with llm_over(executor := ScriptedExecutor()) as llm:
        llm.generate("hel", FEW)
    assert executor.num_closes == 1
