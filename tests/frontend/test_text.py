"""Streamed text: whole characters only, nothing of a stop string, the same however it is read."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from readers import ends_of, is_at_rest, read, read_async, text_of, tokens_of, wait_until
from scripted import EOS, ScriptedExecutor, choice_of, says

from jaxserve.engine.requests import EngineEvent
from jaxserve.frontend.choice_text import ChoiceText
from jaxserve.sampling_params import SamplingParams

TEXT = "héllo 🙂 wörld, héllo ∑ and the rest"
PROMPT = [65, 66, 67]


def text_params(**changes):
    return SamplingParams(**{"max_tokens": 80, **changes})


@pytest.fixture
def frontend(frontend_over, tokenizer):
    return frontend_over(ScriptedExecutor(says(tokenizer.encode(TEXT, add_special=False))))


@pytest.mark.parametrize("reader", [read, read_async])
def test_streamed_is_the_whole_text_in_whole_characters(frontend, reader):
    deltas = reader(frontend.submit(PROMPT, text_params()))
    assert text_of(deltas) == TEXT
    assert not any("\N{REPLACEMENT CHARACTER}" in delta.text for delta in deltas)
    assert any(delta.token_ids and not delta.text for delta in deltas)  # a character under way
    assert ends_of(deltas) == {0: "stop"}
    assert deltas[-1].stop_reason is None
    assert tokens_of(deltas)[-1] == EOS


def test_a_character_cut_off_by_max_tokens_is_shown_as_broken(frontend):
    deltas = read(frontend.submit(PROMPT, text_params(max_tokens=2)))  # "h" and half of "é"
    assert text_of(deltas) == "h\N{REPLACEMENT CHARACTER}"
    assert ends_of(deltas) == {0: "length"}


@pytest.mark.parametrize("reader", [read, read_async])
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("include", [True, False])
def test_a_stop_string_over_many_tokens(frontend_over, tokenizer, reader, include, overlap):
    """No piece of it gets out, the engine's request is aborted, its pages come back."""
    tokens = tokenizer.encode(TEXT, add_special=False)
    frontend = frontend_over(ScriptedExecutor(says(tokens)), overlap=overlap)
    params = text_params(stop=["nowhere", "🙂 wör"], include_stop_str_in_output=include)
    deltas = reader(frontend.submit(PROMPT, params))
    assert text_of(deltas) == ("héllo 🙂 wör" if include else "héllo ")
    assert deltas[-1].stop_reason == "🙂 wör"
    assert ends_of(deltas) == {0: "stop"}
    wait_until(lambda: is_at_rest(frontend))
    assert frontend.stats().requests_finished_total["stop"] == 1
    assert len(tokens_of(deltas)) < len(tokens)
    assert frontend.stats().steps_total <= len(tokens_of(deltas)) + 1 + overlap


def test_what_looked_like_a_stop_string_comes_out_after_all(frontend):
    deltas = read(frontend.submit(PROMPT, text_params(stop="the restaurant")))
    assert text_of(deltas) == TEXT
    held = [delta for delta in deltas if delta.token_ids and not delta.text]
    assert len(held) >= len("the rest")


def test_a_stop_string_that_ends_with_the_last_token_allowed(frontend):
    deltas = read(frontend.submit(PROMPT, text_params(stop="o", max_tokens=5)))  # h, é in two, hel is no token here
    assert tokens_of(deltas)[-1] != EOS
    cut = text_of(deltas)
    assert (cut, deltas[-1].finish_reason, deltas[-1].stop_reason) in [("héll", "length", None), ("héll", "stop", "o")]


def test_one_choice_stops_by_its_text_and_the_other_goes_on(frontend_over, tokenizer):
    texts = ["one STOP two", "three four five"]
    ids = [tokenizer.encode(text, add_special=False) for text in texts]
    executor = ScriptedExecutor(lambda request, n: says(ids[choice_of(request)])(request, n))
    deltas = read(frontend_over(executor).submit(PROMPT, text_params(n=2, stop="STOP")))
    assert [text_of(deltas, index) for index in (0, 1)] == ["one ", "three four five"]
    assert ends_of(deltas) == {0: "stop", 1: "stop"}


@pytest.mark.parametrize("include", [True, False])
def test_a_stop_token_ends_and_its_text_shows_only_if_included(frontend, tokenizer, include):
    comma = tokenizer.encode(",", add_special=False)
    deltas = read(frontend.submit(PROMPT, text_params(stop_token_ids=comma, include_stop_str_in_output=include)))
    assert text_of(deltas) == TEXT[: TEXT.index(",") + include]
    assert deltas[-1].stop_reason == comma[0]
    assert tokens_of(deltas)[-1] == comma[0]


def test_end_of_sequence_shows_as_text_when_asked_for(frontend):
    params = text_params(include_stop_str_in_output=True, skip_special_tokens=False)
    assert text_of(read(frontend.submit(PROMPT, params))) == TEXT + "<|im_end|>"


def test_ignore_eos_goes_on(frontend):
    deltas = read(frontend.submit(PROMPT, text_params(max_tokens=60, ignore_eos=True)))
    assert len(tokens_of(deltas)) == 60
    assert ends_of(deltas) == {0: "length"}
    assert text_of(deltas) == TEXT  # special tokens have no text


def test_min_tokens_outlasts_end_of_sequence_and_stop_tokens(frontend_over):
    executor = ScriptedExecutor(says([70, 71]))  # then end-of-sequence for ever: a fake does not mask it
    frontend = frontend_over(executor)
    for stops in (None, [70]):
        deltas = read(frontend.submit(PROMPT, text_params(min_tokens=5, stop_token_ids=stops)))
        assert tokens_of(deltas) == [70, 71, EOS, EOS, EOS]
        assert ends_of(deltas) == {0: "stop"}


def test_stop_strings_count_from_min_tokens_on(frontend, tokenizer):
    """The first héllo lies within the ten tokens that were asked for; the second ends the answer."""
    deltas = read(frontend.submit(PROMPT, text_params(min_tokens=10, stop="héllo")))
    assert text_of(deltas) == "héllo 🙂 wörld, "
    assert deltas[-1].stop_reason == "héllo"


def test_no_text_without_detokenizing_or_without_a_tokenizer(frontend_over):
    for options in ({"text": True}, {"text": False}):
        frontend = frontend_over(ScriptedExecutor(says([70, 71])), **options)
        params = text_params(detokenize=not options["text"])
        deltas = read(frontend.submit(PROMPT, params))
        assert (text_of(deltas), tokens_of(deltas)) == ("", [70, 71, EOS])


def test_a_character_begun_in_the_prompt_is_completed(frontend_over):
    first, second = "é".encode()
    frontend = frontend_over(ScriptedExecutor(says([second, 65])))
    assert text_of(read(frontend.submit([65, first], text_params()))) == "éA"


@given(
    text=st.text("abé🙂", max_size=30),
    stops=st.lists(st.text("abé🙂", min_size=1, max_size=4), max_size=3),
    cuts=st.lists(st.integers(1, 5), min_size=1),
    include=st.booleans(),
    ends=st.sampled_from(["stop", "length"]),
)
def test_however_tokens_arrive_the_text_is_cut_at_the_first_stop_string(tokenizer, text, stops, cuts, include, ends):
    params = SamplingParams(stop=stops, include_stop_str_in_output=include)
    choice = ChoiceText(0, params, tokenizer, [65])
    left = tokenizer.encode(text, add_special=False) + ([EOS] if ends == "stop" else [])
    shown, stop_reason = "", None
    while left and stop_reason is None:
        take = cuts[len(left) % len(cuts)]
        now, left = left[:take], left[take:]
        event = EngineEvent(request_id="r/0", token_ids=tuple(now), finish_reason=None if left else ends)
        delta = choice.delta(event)
        shown, stop_reason = shown + delta.text, delta.stop_reason
    assert (shown, stop_reason) == cut(text, stops, include)


def cut(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """The definition: the stop string that is complete first, the longest of several."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            longest = max(complete, key=len)
            return text[: end if include else end - len(longest)], longest
    return text, None
