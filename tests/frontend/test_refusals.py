"""What is refused, with which error and which words, before it reaches the engine."""

import runpy
import threading

import pytest
from readers import ends_of, is_at_rest, read, tokens_of, wait_until
from scripted import EOS, VOCABULARY, ScriptedExecutor, choice_of, hashed, hashed_token

from jaxserve.errors import EngineDied, InvalidRequest, Overloaded, PromptTooLong, ShuttingDown
from jaxserve.frontend import frontend as frontend_module
from jaxserve.sampling_params import SamplingParams

PROMPT = [72, 73, 74]
FEW = SamplingParams(max_tokens=3)


@pytest.fixture
def frontend(frontend_over):
    return frontend_over(ScriptedExecutor(), max_open=4)


@pytest.mark.parametrize("wrong", [-1, VOCABULARY])
def test_token_ids_outside_the_vocabulary(frontend, wrong):
    cases = [("prompt", [1, wrong, 2], FEW)]
    if wrong > 0:  # SamplingParams refuses negative ones by itself
        cases += [
            ("logit_bias", PROMPT, SamplingParams(logit_bias={3: 1.0, wrong: 2.0})),
            ("stop_token_ids", PROMPT, SamplingParams(stop_token_ids=[3, wrong])),
        ]
    for name, prompt, params in cases:
        with pytest.raises(InvalidRequest, match=f"{name}: token id {wrong} .* 262") as caught:
            frontend.submit(prompt, params)
        assert caught.value.param == name
    assert frontend.drain(0.0)


@pytest.mark.parametrize("wrong", ["a", 1.5, None])
def test_token_ids_that_are_no_integers(frontend, wrong):
    plain = runpy.run_path(frontend_module.__file__)["Frontend"]  # without the tests' own type checks
    with pytest.raises(InvalidRequest, match="prompt: token ids are integers, got"):
        plain._check_ids(frontend, [1, wrong], FEW)


def test_the_last_token_of_the_vocabulary_is_accepted(frontend):
    last = VOCABULARY - 1
    params = SamplingParams(max_tokens=2, logit_bias={last: 1.0}, stop_token_ids=[last])
    assert tokens_of(read(frontend.submit([last, 0], params)))


def test_prompts_that_cannot_run(frontend_over):
    frontend = frontend_over(ScriptedExecutor(), num_pages=10)
    with pytest.raises(InvalidRequest, match="no tokens"):
        frontend.submit([], FEW)
    with pytest.raises(PromptTooLong, match="prompt has 100 tokens; this model accepts 99 "):
        frontend.submit([1] * 100, FEW)
    with pytest.raises(PromptTooLong, match="need 41 tokens; the KV cache holds 40"):
        frontend.submit([1] * 38, FEW)
    assert ends_of(read(frontend.submit([1] * 37, FEW))) == {0: "length"}


def test_text_needs_a_tokenizer(frontend_over):
    frontend = frontend_over(ScriptedExecutor(), text=False)
    with pytest.raises(InvalidRequest, match="no tokenizer: send token ids"):
        frontend.encode_prompt("hello")
    with pytest.raises(InvalidRequest, match="no tokenizer"):
        frontend.encode_chat([{"role": "user", "content": "hello"}])
    with pytest.raises(InvalidRequest, match="stop strings need a tokenizer"):
        frontend.submit(PROMPT, SamplingParams(stop="x"))


def test_a_conversation_needs_a_template(frontend):
    with pytest.raises(InvalidRequest, match="no chat template; use completions, or --chat-template"):
        frontend.encode_chat([{"role": "user", "content": "hello"}])


def test_a_prompt_gets_its_bos(frontend):
    assert frontend.encode_prompt("hel!") == [258, 257, 33]


def test_overloaded_counts_choices_and_only_open_ones(frontend_over):
    frontend = frontend_over(executor := ScriptedExecutor(), max_open=4)
    executor.gate.clear()
    generations = [frontend.submit(PROMPT, SamplingParams(n=3, max_tokens=2))]
    with pytest.raises(Overloaded, match="3 sequences are open and 2 more asked for; at most 4") as caught:
        frontend.submit(PROMPT, SamplingParams(n=2))
    assert caught.value.retry_after_seconds >= 1
    generations.append(frontend.submit(PROMPT, FEW))
    with pytest.raises(Overloaded):
        frontend.submit(PROMPT, FEW)
    executor.gate.set()
    for generation in generations:
        read(generation)
    assert ends_of(read(frontend.submit(PROMPT, SamplingParams(n=4, max_tokens=2)))) == dict.fromkeys(
        range(4), "length"
    )


def test_a_request_id_in_use_is_refused_to_its_second_owner_only(frontend_over):
    may_go_on = threading.Semaphore(0)

    def script(request, n):
        assert n not in (3, 6) or may_go_on.acquire(timeout=30)
        return hashed(request, n)

    frontend = frontend_over(ScriptedExecutor(script))
    first = frontend.submit(PROMPT, SamplingParams(max_tokens=9), request_id="mine")
    second = frontend.submit([80, 81], SamplingParams(n=2), request_id="mine")
    may_go_on.release()
    with pytest.raises(InvalidRequest, match="'mine/0' is already in use"):
        read(second)
    second.abort()  # says nothing about the first, which still runs
    may_go_on.release()
    assert tokens_of(read(first)) == [hashed_token(PROMPT, 0, n) for n in range(9)]
    third = frontend.submit([80, 81], FEW, request_id="mine")
    assert tokens_of(read(third)) == [hashed_token([80, 81], 0, n) for n in range(3)]


def test_an_id_that_is_half_free_leaves_nothing_behind(frontend_over):
    """Choice 0 of the first has ended, so that choice 0 of the second could be added and 1 could not."""
    may_go_on = threading.Event()

    def script(request, n):
        assert n != 3 or may_go_on.wait(30)
        return 70 if choice_of(request) else EOS

    frontend = frontend_over(ScriptedExecutor(script))
    first = frontend.submit(PROMPT, SamplingParams(n=2, max_tokens=20), request_id="mine")
    deltas = iter(first)
    seen = []
    while 0 not in ends_of(seen):
        seen.append(next(deltas))
    second = frontend.submit(PROMPT, SamplingParams(n=2, max_tokens=50), request_id="mine")
    may_go_on.set()
    with pytest.raises(InvalidRequest, match="'mine/1' is already in use"):
        read(second)
    list(deltas)
    wait_until(lambda: is_at_rest(frontend))
    assert ends_of(read(frontend.submit(PROMPT, SamplingParams(n=2), request_id="mine"))) == {0: "stop", 1: "length"}


def test_after_drain_and_after_close_nothing_is_accepted(frontend_over):
    for stop in ("drain", "close"):
        frontend = frontend_over(ScriptedExecutor())
        assert frontend.is_ready
        frontend.drain(0.0) if stop == "drain" else frontend.close()
        assert not frontend.is_ready
        with pytest.raises(ShuttingDown):
            frontend.submit(PROMPT, FEW)


def test_after_the_engine_died_nothing_is_accepted(frontend_over):
    executor = ScriptedExecutor()
    executor.failure = RuntimeError("chip on fire")
    frontend = frontend_over(executor)
    with pytest.raises(EngineDied):
        read(frontend.submit(PROMPT, FEW))
    with pytest.raises(EngineDied, match="chip on fire"):
        frontend.submit(PROMPT, FEW)
    assert not frontend.is_ready
