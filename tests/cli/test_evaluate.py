"""`jaxserve eval perplexity` says what was measured, the same as lines and as JSON."""

import json
import math

import pytest

from jaxserve.outputs import Logprob
from jaxserve.sampling_params import SamplingParams


class Tokens:
    def encode_plain(self, text: str) -> list[int]:
        return list(text.encode())

    def with_bos(self, ids: list[int]) -> list[int]:
        return ids

    def token_bytes(self, token: int) -> bytes:
        return bytes([token])


@pytest.fixture
def scored(starts, monkeypatch):
    """The fake frontend with one token for each byte, each as likely as one of four."""
    starts.frontend.tokenizer = Tokens()
    plain = starts.frontend.submit

    def submit(ids: list[int], params: SamplingParams):
        generation = plain(ids, params)
        generation.prompt_logprobs = [None, *({token: Logprob(-math.log(4), 1)} for token in ids[1:])]
        return generation

    monkeypatch.setattr(starts.frontend, "submit", submit)
    return starts


def test_lines(run, scored, tmp_path):
    (tmp_path / "t.txt").write_text("a" * 101)
    ran = run("eval", "perplexity", "m", "--text", str(tmp_path / "t.txt"), "--max-length", "50")
    rows = {line[:16].strip(): line[16:] for line in ran.out.splitlines()}
    assert ran.code == 0
    assert rows["windows"] == "4 of 50 tokens, stride 25"
    assert rows["tokens scored"] == "100 (100 bytes)"
    assert rows["nats per token"] == f"{math.log(4):.8f}"
    assert rows["bits per byte"] == "2.00000000"
    assert rows["perplexity"] == "4.000000"
    assert scored.frontend.num_closed == 1


def test_json_of_the_built_in_text(run, scored):
    found = json.loads(run("eval", "perplexity", "m", "--json").out)
    assert found["text"] == "built-in"
    assert found["num_tokens"] == 4875
    assert found["perplexity"] == pytest.approx(4.0)
    assert (found["max_length"], found["stride"]) == (99, 49)


@pytest.mark.parametrize(
    ("content", "said"), [(b"\x00\x01", "is zero"), (b"\xff", "not UTF-8"), (b"short", "the text has 5 tokens")]
)
def test_what_cannot_be_measured(run, scored, tmp_path, content, said):
    (tmp_path / "t").write_bytes(content)
    ran = run("eval", "perplexity", "m", "--text", str(tmp_path / "t"))
    assert ran.code == 2
    assert said in ran.error_line()


def test_a_model_without_a_tokenizer(run, starts):
    starts.frontend.tokenizer = None
    ran = run("eval", "perplexity", "m")
    assert ran.code == 2
    assert "no tokenizer" in ran.error_line()
