"""A tour of the API with the real openai client, for any server: the fake one here, the real engine elsewhere.

It asserts shapes and equalities, never a text. The stops take the client as Any: its types make every field optional.
"""

from typing import Any

import openai
import pytest
from openai import OpenAI

MESSAGES: list[Any] = [{"role": "user", "content": "Name three rivers."}]
PROMPT = "The three largest rivers are"


def openai_tour(base_url: str, model: str, api_key: str = "none") -> None:
    """Runs every stop of the tour. base_url ends in /v1."""
    client = OpenAI(base_url=base_url, api_key=api_key, max_retries=0, timeout=120)
    names = [card.id for card in client.models.list()]
    assert model in names
    assert client.models.retrieve(model).id == model
    stops = (chat, chat_stream, chat_logprobs, several_choices, stop_strings, seeds, completion, scoring, errors)
    for stop in stops:
        stop(client, model)


def chat(client: Any, model: str) -> None:
    answer = client.chat.completions.create(model=model, messages=MESSAGES, max_tokens=8, temperature=0)
    choice, usage = answer.choices[0], answer.usage
    assert answer.object == "chat.completion"
    assert choice.message.role == "assistant"
    assert choice.finish_reason in ("stop", "length")
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert 1 <= usage.completion_tokens <= 8
    assert 0 <= usage.prompt_tokens_details.cached_tokens <= usage.prompt_tokens


def chat_stream(client: Any, model: str) -> None:
    kwargs: dict[str, Any] = {"model": model, "messages": MESSAGES, "max_completion_tokens": 12, "temperature": 0}
    whole = client.chat.completions.create(**kwargs)
    chunks = list(client.chat.completions.create(**kwargs, stream=True, stream_options={"include_usage": True}))
    assert {chunk.id for chunk in chunks} == {chunks[0].id}
    assert chunks[0].choices[0].delta.role == "assistant"
    with_choice = [chunk.choices[0] for chunk in chunks[:-1]]
    assert "".join(choice.delta.content or "" for choice in with_choice) == whole.choices[0].message.content
    reasons = [choice.finish_reason for choice in with_choice if choice.finish_reason]
    assert reasons == [whole.choices[0].finish_reason]
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens
    assert all(chunk.usage is None for chunk in chunks[:-1])


def chat_logprobs(client: Any, model: str) -> None:
    kwargs: dict[str, Any] = {"model": model, "messages": MESSAGES, "max_tokens": 6, "temperature": 0}
    answer = client.chat.completions.create(**kwargs, logprobs=True, top_logprobs=3)
    content = answer.choices[0].logprobs.content
    assert len(content) == answer.usage.completion_tokens
    for entry in content:
        assert entry.logprob <= 0
        assert len(entry.top_logprobs) == 3
        values = [top.logprob for top in entry.top_logprobs]
        assert values == sorted(values, reverse=True)
        assert entry.logprob == pytest.approx(values[0])  # temperature 0 chooses the likeliest
    chunks = client.chat.completions.create(**kwargs, logprobs=True, top_logprobs=3, stream=True)
    streamed = [e for c in chunks for choice in c.choices if choice.logprobs for e in choice.logprobs.content]
    assert [entry.token for entry in streamed] == [entry.token for entry in content]


def several_choices(client: Any, model: str) -> None:
    kwargs: dict[str, Any] = {"model": model, "messages": MESSAGES, "max_tokens": 6, "n": 3, "seed": 11}
    whole = client.chat.completions.create(**kwargs)
    assert [choice.index for choice in whole.choices] == [0, 1, 2]
    texts = {0: "", 1: "", 2: ""}
    for chunk in client.chat.completions.create(**kwargs, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == {choice.index: choice.message.content for choice in whole.choices}


def stop_strings(client: Any, model: str) -> None:
    kwargs: dict[str, Any] = {"model": model, "prompt": PROMPT, "max_tokens": 24, "temperature": 0}
    text = client.completions.create(**kwargs).choices[0].text
    stop = text[len(text) // 2 : len(text) // 2 + 3]
    stopped = client.completions.create(**kwargs, stop=[stop, "never in this text"]).choices[0]
    assert stopped.finish_reason == "stop"
    assert stopped.text == text[: text.index(stop)]
    chunks = client.completions.create(**kwargs, stop=stop, stream=True)
    assert "".join(chunk.choices[0].text for chunk in chunks) == stopped.text
    kept = client.completions.create(**kwargs, stop=stop, extra_body={"include_stop_str_in_output": True})
    assert kept.choices[0].text == stopped.text + stop


def seeds(client: Any, model: str) -> None:
    kwargs: dict[str, Any] = {"model": model, "prompt": PROMPT, "max_tokens": 16, "temperature": 1.0}
    first = client.completions.create(**kwargs, seed=5).choices[0].text
    assert client.completions.create(**kwargs, seed=5).choices[0].text == first
    chunks = client.completions.create(**kwargs, seed=5, stream=True)
    assert "".join(chunk.choices[0].text for chunk in chunks) == first
    others = {client.completions.create(**kwargs, seed=seed).choices[0].text for seed in range(6, 10)}
    assert others != {first}


def completion(client: Any, model: str) -> None:
    kwargs: dict[str, Any] = {"model": model, "max_tokens": 5, "temperature": 0, "logprobs": 2}
    both = client.completions.create(prompt=[PROMPT, "Once upon a time"], n=2, **kwargs)
    assert [choice.index for choice in both.choices] == [0, 1, 2, 3]
    alone = client.completions.create(prompt=PROMPT, **kwargs)
    assert both.choices[0].text == both.choices[1].text == alone.choices[0].text
    logprobs = alone.choices[0].logprobs
    lengths = {len(logprobs.tokens), len(logprobs.token_logprobs), len(logprobs.top_logprobs)}
    assert lengths == {len(logprobs.text_offset)} == {alone.usage.completion_tokens}
    assert both.usage.completion_tokens == sum(len(choice.logprobs.tokens) for choice in both.choices)


def scoring(client: Any, model: str) -> None:
    answer = client.completions.create(model=model, prompt=PROMPT, max_tokens=0, echo=True, logprobs=1)
    logprobs = answer.choices[0].logprobs
    assert answer.choices[0].text == PROMPT
    assert answer.usage.completion_tokens == 0
    assert len(logprobs.tokens) == answer.usage.prompt_tokens
    assert logprobs.token_logprobs[0] is None
    assert all(value <= 0 for value in logprobs.token_logprobs[1:])
    echoed = client.completions.create(model=model, prompt=PROMPT, max_tokens=3, echo=True, logprobs=1, temperature=0)
    assert echoed.choices[0].text.startswith(PROMPT)
    num_prompt_tokens = answer.usage.prompt_tokens
    again = echoed.choices[0].logprobs.token_logprobs[1:num_prompt_tokens]
    # float32 on CPU: another bucket or a prefix hit may sum in another order
    assert again == pytest.approx(logprobs.token_logprobs[1:], rel=1e-3, abs=1e-3)


def errors(client: Any, model: str) -> None:
    create = client.chat.completions.create
    with pytest.raises(openai.NotFoundError) as missing:
        create(model="no-such-model", messages=MESSAGES)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as wrong:
        create(model=model, messages=MESSAGES, temperature=-1)
    assert wrong.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as unknown:
        create(model=model, messages=MESSAGES, extra_body={"temprature": 1})
    assert unknown.value.param == "temprature"
    with pytest.raises(openai.BadRequestError, match="response_format"):
        create(model=model, messages=MESSAGES, response_format={"type": "json_object"})
    with pytest.raises(openai.BadRequestError) as too_long:
        client.completions.create(model=model, prompt="long " * 200_000, max_tokens=1)
    assert too_long.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError):
        client.completions.create(model=model, prompt=[], max_tokens=1)
