"""What request fields become: sampling parameters, prompts, template arguments; and what is refused."""

from collections.abc import Iterator

import httpx
import pytest
from fake_frontend import BOS, FakeFrontend
from loopback import running_server

from jaxserve.server.options import ServerOptions

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[FakeFrontend, httpx.Client]]:
    frontend = FakeFrontend()
    with running_server(frontend, ServerOptions()) as base, httpx.Client(base_url=base) as client:
        yield frontend, client


@pytest.fixture
def frontend(served):
    """The frontend of this file's one server, with nothing recorded yet."""
    frontend, _ = served
    for record in (frontend.submitted, frontend.params, frontend.options, frontend.chats):
        record.clear()
    return frontend


@pytest.fixture
def post(served):
    _, client = served
    return lambda path, body: client.post(path, json=body)


def test_every_sampling_field_arrives(post, frontend):
    fields = {
        "n": 2, "temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "repetition_penalty": 1.1,
        "presence_penalty": 0.2, "frequency_penalty": 0.3, "seed": 9, "stop": ["zz"], "stop_token_ids": [3],
        "include_stop_str_in_output": True, "ignore_eos": True, "min_tokens": 1, "max_tokens": 4,
        "skip_special_tokens": False, "prompt_logprobs": 1,
    }  # fmt: skip
    extra = {"logit_bias": {"12": -5}, "logprobs": 3, "priority": 4, "cache_salt": "mine"}
    assert post(TEXT, {"prompt": "a", **fields, **extra}).status_code == 200
    params = frontend.params[0]
    assert {name: getattr(params, name) for name in fields} == fields
    assert params.logit_bias == {12: -5.0}
    assert params.logprobs == 3
    assert frontend.options == [{"priority": 4, "cache_salt": "mine"}]


def test_defaults_differ_between_the_two_apis(post, frontend):
    post(TEXT, {"prompt": "a", "temperature": None})
    post(CHAT, {"messages": MESSAGES})
    assert [p.max_tokens for p in frontend.params] == [16, None]
    assert [p.temperature for p in frontend.params] == [1.0, 1.0]


def test_the_models_defaults_stand_where_a_request_names_nothing(post, frontend):
    frontend.sampling_defaults = {"temperature": 0.6, "top_k": 20, "max_tokens": 5}
    post(TEXT, {"prompt": "a"})
    post(CHAT, {"messages": MESSAGES})
    post(TEXT, {"prompt": "a", "temperature": 0, "max_tokens": 7})
    post(CHAT, {"messages": MESSAGES, "top_k": 0, "max_completion_tokens": 7})
    post(TEXT, {"prompt": "a", "max_tokens": 0, "echo": True})
    found = [(p.temperature, p.top_k, p.max_tokens) for p in frontend.params]
    assert found == [(0.6, 20, 5), (0.6, 20, 5), (0, 20, 7), (0.6, 0, 7), (0.6, 20, 1)]


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("ab", [[BOS, 97, 98]]),
        (["a", "b"], [[BOS, 97], [BOS, 98]]),
        ([5, 6], [[5, 6]]),
        ([[5], [6, 7]], [[5], [6, 7]]),
        (["a", [6]], [[BOS, 97], [6]]),
    ],
)
def test_prompt_forms(post, frontend, prompt, expected):
    answer = post(TEXT, {"prompt": prompt, "max_tokens": 1})
    assert [g.prompt_token_ids for g in frontend.submitted] == expected
    assert [c["index"] for c in answer.json()["choices"]] == list(range(len(expected)))
    assert answer.json()["usage"]["prompt_tokens"] == sum(map(len, expected))


def test_prompt_without_special_tokens(post, frontend):
    post(TEXT, {"prompt": "ab", "max_tokens": 1, "add_special_tokens": False})
    assert frontend.submitted[0].prompt_token_ids == [97, 98]


def test_template_arguments(post, frontend):
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
    ]
    tools = [{"type": "function", "function": {"name": "f"}}]
    body = {"messages": messages, "tools": tools, "chat_template_kwargs": {"enable_thinking": False}, "max_tokens": 1}
    post(CHAT, body)
    post(CHAT, {**body, "tool_choice": "none", "continue_final_message": True})
    (sent, kwargs), (_, other) = frontend.chats
    assert sent[0]["content"] == "a\nb"
    assert sent[1]["tool_calls"][0]["function"]["arguments"] == {"x": 1}
    assert kwargs == {"add_generation_prompt": True, "enable_thinking": False, "tools": tools}
    assert other == {"add_generation_prompt": False, "enable_thinking": False, "continue_final_message": True}


def test_harmless_fields_are_accepted(post):
    harmless = {
        "user": "u",
        "metadata": {"a": "b"},
        "store": False,
        "service_tier": "auto",
        "parallel_tool_calls": True,
    }
    body = {"messages": MESSAGES, "max_tokens": 1, "response_format": {"type": "text"}, **harmless}
    assert post(CHAT, body).status_code == 200


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (CHAT, {"messages": []}, "messages"),
        (CHAT, {"messages": "hi"}, "messages"),
        (CHAT, {"messages": [{"content": "x"}]}, "messages.0.role"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages"),
        (CHAT, {"messages": [{"role": "alien", "content": "x"}]}, "messages"),
        (CHAT, {"stream": "yes"}, "stream"),
        (CHAT, {"max_tokens": 1.5}, "max_tokens"),
        (CHAT, {"max_tokens": True}, "max_tokens"),
        (CHAT, {"max_tokens": 0}, "max_tokens"),
        (CHAT, {"max_tokens": 1, "max_completion_tokens": 2}, "max_tokens"),
        (CHAT, {"temperature": "hot"}, "temperature"),
        (CHAT, {"temperature": 101}, "temperature"),
        (CHAT, {"n": 0}, "n"),
        (CHAT, {"stop": [1]}, "stop"),
        (CHAT, {"logit_bias": {"x": 1}}, "logit_bias"),
        (CHAT, {"logit_bias": {"1": 101}}, "logit_bias"),
        (CHAT, {"top_logprobs": 2}, "top_logprobs"),
        (CHAT, {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        (CHAT, {"tool_choice": "required"}, "tool_choice"),
        (CHAT, {"tool_choice": {"type": "function"}}, "tool_choice"),
        (CHAT, {"response_format": {"type": "json_schema"}}, "response_format"),
        (CHAT, {"stream_options": {"include_usage": True}}, "stream_options"),
        (CHAT, {"stream": True, "stream_options": {"usage": True}}, "stream_options.usage"),
        (CHAT, {"stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
        (CHAT, {"store": True}, "store"),
        (CHAT, {"service_tier": "flex"}, "service_tier"),
        (CHAT, {"functions": []}, "functions"),
        (CHAT, {"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        (CHAT, {"add_generation_prompt": True, "continue_final_message": True}, "continue_final_message"),
        (TEXT, {"prompt": []}, "prompt"),
        (TEXT, {"prompt": [[]]}, "prompt"),
        (TEXT, {"prompt": [1, "a"]}, "prompt"),
        (TEXT, {"prompt": [-1]}, "prompt"),
        (TEXT, {"prompt": None}, "prompt"),
        (TEXT, {"prompt": {"a": 1}}, "prompt"),
        (TEXT, {"best_of": 2}, "best_of"),
        (TEXT, {"suffix": "s"}, "suffix"),
        (TEXT, {"max_tokens": 0}, "max_tokens"),
        (TEXT, {"max_tokens": -1}, "max_tokens"),
        (TEXT, {"logprobs": 21}, "logprobs"),
        (TEXT, {"best": 1}, "best"),
    ],
)  # fmt: skip
def test_refused_fields_are_named(post, frontend, path, fields, param):
    answer = post(path, {**({"messages": MESSAGES} if path == CHAT else {"prompt": "a"}), **fields})
    error = answer.json()["error"]
    assert answer.status_code == 400
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert param.split(".")[-1].split()[0] in error["message"]
    assert frontend.submitted == []


def test_required_fields(post):
    assert post(CHAT, {}).json()["error"] == {
        "message": "field 'messages' is required", "type": "invalid_request_error", "param": "messages", "code": None,
    }  # fmt: skip
    assert post(TEXT, {}).json()["error"]["param"] == "prompt"
    assert post(TEXT, {"prompt": "a", "best_of": 2, "n": 2}).status_code == 200
    assert post(TEXT, {"prompt": "a", "model": "other"}).json()["error"]["code"] == "model_not_found"


def test_a_model_without_tokenizer_takes_token_ids(post, frontend, monkeypatch):
    monkeypatch.setattr(frontend, "tokenizer", None)
    answer = post(TEXT, {"prompt": [1, 2], "max_tokens": 2, "logprobs": 1})
    assert answer.status_code == 200
    assert frontend.params[0].detokenize is False
    assert post(TEXT, {"prompt": "text"}).status_code == 400
    assert post("/tokenize", {"prompt": "text"}).status_code == 400
    assert post("/detokenize", {"tokens": [1]}).status_code == 400
