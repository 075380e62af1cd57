"""The exact shapes of whole answers and streams."""

import json
from collections.abc import Callable, Iterator

import httpx
import pytest
from fake_frontend import BOS, FakeFrontend, FakeTokenizer
from loopback import running_server

from jaxserve.server.options import ServerOptions

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def post() -> Iterator[Callable[[str, dict], httpx.Response]]:
    with running_server(FakeFrontend(), ServerOptions()) as base, httpx.Client(base_url=base) as client:
        yield lambda path, body: client.post(path, json=body)


def events(answer: httpx.Response) -> list[dict]:
    """The JSON events of a stream that must end with [DONE]."""
    assert answer.headers["content-type"].startswith("text/event-stream")
    parts = answer.text.split("\n\n")
    assert parts[-2:] == ["data: [DONE]", ""]
    return [json.loads(part.removeprefix("data: ")) for part in parts[:-2]]


def test_chat_answer(post):
    answer = post(CHAT, {"messages": MESSAGES, "max_tokens": 2, "temperature": 0}).json()
    choice = answer["choices"][0]
    assert set(answer) == {"id", "object", "created", "model", "choices", "usage"}
    assert choice == {
        "index": 0,
        "message": {"role": "assistant", "content": choice["message"]["content"], "refusal": None},
        "logprobs": None,
        "finish_reason": "length",
        "stop_reason": None,
    }
    assert answer["usage"] == {
        "prompt_tokens": 10, "completion_tokens": 2, "total_tokens": 12, "prompt_tokens_details": {"cached_tokens": 4},
    }  # fmt: skip


def test_chat_logprobs_have_bytes_and_the_best_first(post):
    body = {"messages": MESSAGES, "max_tokens": 12, "temperature": 0, "logprobs": True, "top_logprobs": 2}
    content = post(CHAT, body).json()["choices"][0]["logprobs"]["content"]
    assert len(content) == 12
    for entry in content:
        assert bytes(entry["bytes"]).decode() == entry["token"]
        assert [top["logprob"] for top in entry["top_logprobs"]] == [-0.5, -1.0]
        assert entry["top_logprobs"][0]["token"] == entry["token"]
    alone = post(CHAT, {**body, "top_logprobs": None}).json()["choices"][0]["logprobs"]["content"]
    assert all(entry["top_logprobs"] == [] for entry in alone)


def test_scoring_gives_prompt_logprobs_only(post):
    body = {"prompt": "hé!", "max_tokens": 0, "echo": True, "logprobs": 2, "temperature": 0}
    answer = post(TEXT, body).json()
    choice = answer["choices"][0]
    assert choice["text"] == "hé!"
    assert choice["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 0
    logprobs = choice["logprobs"]
    assert logprobs["tokens"][:2] == ["<s>", "h"]
    assert logprobs["token_logprobs"] == [None, -2.0, -2.0, -2.0, -2.0]
    assert logprobs["top_logprobs"][0] is None
    assert logprobs["top_logprobs"][1] == {" alpha": -0.25, " beta": -0.5, "h": -2.0}
    assert logprobs["text_offset"] == [0, 0, 1, 2, 2]  # é spans two tokens; the BOS is not in the text


def test_echo_of_token_ids(post):
    body = {"prompt": [BOS, 104, 105], "max_tokens": 2, "echo": True, "logprobs": 0, "temperature": 0}
    choice = post(TEXT, body).json()["choices"][0]
    assert choice["text"].startswith("<s>hi ")
    logprobs = choice["logprobs"]
    assert logprobs["text_offset"][:4] == [0, 3, 4, 5]
    for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        assert choice["text"].startswith(token, offset)
    assert all(len(top) == 1 for top in logprobs["top_logprobs"][1:])


@pytest.mark.parametrize("extra", [{}, {"stop": " epsilon"}, {"n": 3, "seed": 4, "temperature": 1}])
def test_streamed_completion_equals_whole(post, extra):
    body = {"prompt": ["a", "b"], "max_tokens": 9, "temperature": 0, "echo": True, "logprobs": 1, **extra}
    whole = post(TEXT, body).json()
    streamed = events(post(TEXT, {**body, "stream": True, "stream_options": {"include_usage": True}}))
    assert streamed[-1]["usage"] == whole["usage"]
    assert all(event["usage"] is None for event in streamed[:-1])
    for expected in whole["choices"]:
        parts = [c for e in streamed for c in e["choices"] if c["index"] == expected["index"]]
        assert "".join(part["text"] for part in parts) == expected["text"]
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            assert [x for part in parts for x in part["logprobs"][name]] == expected["logprobs"][name]
        assert [p["finish_reason"] for p in parts if p["finish_reason"]] == [expected["finish_reason"]]
        assert parts[-1]["stop_reason"] == expected["stop_reason"]


def test_running_usage(post):
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"messages": MESSAGES, "max_tokens": 3, "temperature": 0, "stream": True, "stream_options": options}
    counts = [event["usage"]["completion_tokens"] for event in events(post(CHAT, body))]
    assert counts == [0, 1, 2, 3, 3]


def test_token_ids_and_prompt_logprobs(post):
    body = {"messages": MESSAGES, "max_tokens": 3, "temperature": 0, "return_token_ids": True}
    whole = post(CHAT, {**body, "prompt_logprobs": 1}).json()
    text = FakeTokenizer().decode(whole["choices"][0]["token_ids"])
    assert text == whole["choices"][0]["message"]["content"]
    assert len(whole["prompt_token_ids"]) == whole["usage"]["prompt_tokens"] == len(whole["prompt_logprobs"])
    assert whole["prompt_logprobs"][0] is None
    chosen = whole["prompt_logprobs"][1][str(whole["prompt_token_ids"][1])]
    assert chosen == {"logprob": -2.0, "rank": 3, "decoded_token": "u"}
    streamed = events(post(CHAT, {**body, "stream": True}))
    assert streamed[0]["prompt_token_ids"] == whole["prompt_token_ids"]
    ids = [i for event in streamed for c in event["choices"] for i in c.get("token_ids", [])]
    assert ids == whole["choices"][0]["token_ids"]
    plain = post(TEXT, {"prompt": "a", "max_tokens": 2, "return_token_ids": True, "prompt_logprobs": 0}).json()
    assert plain["choices"][0]["prompt_token_ids"] == [BOS, 97]
    assert plain["choices"][0]["prompt_logprobs"][1]["97"]["logprob"] == -2.0


def test_tokens_as_ids(post):
    body = {"prompt": "a", "max_tokens": 1, "logprobs": 1, "return_tokens_as_token_ids": True, "return_token_ids": True}
    choice = post(TEXT, body).json()["choices"][0]
    assert choice["logprobs"]["tokens"] == [f"token_id:{choice['token_ids'][0]}"]


def test_tokenize_and_detokenize(post):
    text = post("/tokenize", {"prompt": "hi", "return_token_strs": True}).json()
    assert text == {"count": 3, "max_model_len": 2048, "tokens": [BOS, 104, 105], "token_strs": ["<s>", "h", "i"]}
    assert post("/tokenize", {"prompt": "hi", "add_special_tokens": False}).json()["tokens"] == [104, 105]
    chat = post("/tokenize", {"messages": MESSAGES}).json()
    assert FakeTokenizer().decode(chat["tokens"]) == "user: hi\n"
    assert post("/detokenize", {"tokens": [BOS, 104]}).json() == {"prompt": "<s>h"}
    assert post("/detokenize", {"tokens": [10**6]}).json()["error"]["param"] == "tokens"
