"""Every token is scored once, with the context that was promised, and the sums are what numpy says."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.errors import ConfigError, InvalidRequest, JaxserveError
from jaxserve.evals.perplexity import lengths, measure, windows

TEXT = "It was almost dark when the boat turned back, and somebody raised a lantern."


@given(st.integers(1, 200), st.integers(2, 50), st.data())
def test_windows_score_every_token_once_with_enough_before_it(num_tokens, max_length, data):
    stride = data.draw(st.integers(1, max_length - 1))
    scored = []
    for number, window in enumerate(windows(num_tokens, max_length, stride)):
        assert 0 < window.end - window.start <= max_length
        assert window.start <= window.first_scored < window.end
        if number:
            assert window.first_scored - window.start >= max_length - stride
        scored += range(window.first_scored, window.end)
    assert scored == list(range(num_tokens))


@pytest.mark.parametrize("has_bos", [False, True])
@pytest.mark.parametrize(("max_length", "stride"), [(63, 20), (16, 15), (8, 1), (2, 1)])
def test_figures_are_those_of_the_log_probabilities(scoring, has_bos, max_length, stride):
    frontend = scoring(has_bos)
    seen: list[tuple[int, int]] = []
    found = measure(
        frontend, TEXT, max_length=max_length, stride=stride, advance=lambda *progress: seen.append(progress)
    )
    ids = list(TEXT.encode())[0 if has_bos else 1 :]
    nats = np.log(2 + np.asarray(ids, np.float64) / 256)
    assert (found.num_tokens, found.num_bytes) == (len(ids), len(ids))
    assert found.nats_per_token == pytest.approx(nats.mean(), rel=1e-14)
    assert found.perplexity == pytest.approx(math.exp(nats.mean()), rel=1e-14)
    assert found.bits_per_byte == pytest.approx(nats.sum() / math.log(2) / len(ids), rel=1e-14)
    assert max(map(len, frontend.prompts)) <= max_length
    assert all((prompt[0] == 256) is has_bos for prompt in frontend.prompts)
    assert seen[-1] == (found.num_windows, found.num_windows) == (len(frontend.prompts),) * 2
    assert all(params.prompt_logprobs == 0 and params.temperature == 0 for params in frontend.params)


def test_a_model_without_a_tokenizer(scoring):
    frontend = scoring()
    frontend.tokenizer = None
    with pytest.raises(ConfigError, match="no tokenizer"):
        measure(frontend, TEXT, max_length=8, stride=4)


@pytest.mark.parametrize("text", ["", "a", "only sixteen    "])
def test_a_text_that_is_too_short(scoring, text):
    with pytest.raises(InvalidRequest, match=f"the text has {len(text)} tokens; perplexity needs at least 17"):
        measure(scoring(), text, max_length=8, stride=4)


@pytest.mark.parametrize("score", [None, lambda token: math.nan, lambda token: -math.inf])
def test_what_is_not_finite_has_no_perplexity(scoring, score):
    frontend = scoring()
    frontend.score = score
    with pytest.raises(JaxserveError, match="no finite logits"):
        measure(frontend, TEXT, max_length=8, stride=4)


def test_lengths_that_are_chosen():
    assert lengths(8192, None, None) == (1024, 512)
    assert lengths(512, None, None) == (511, 255)
    assert lengths(512, 100, None) == (100, 50)
    assert lengths(512, 2, 1) == (2, 1)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ((512, None), "--max-length 512: windows of this model have 2 to 511 tokens"),
        ((1, None), "--max-length 1:"),
        ((8, 8), "--stride 8 must be from 1 to 7"),
        ((8, 0), "--stride 0 must"),
    ],
)
def test_lengths_that_cannot_be(asked, said):
    with pytest.raises(ConfigError) as caught:
        lengths(512, *asked)
    assert said in str(caught.value)
