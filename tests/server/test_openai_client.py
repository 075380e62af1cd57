"""The server through the real openai client."""

from typing import Any

import httpx
import openai
import pytest
from fake_frontend import FakeFrontend, Faults
from openai_tour import openai_tour

MESSAGES: list[Any] = [{"role": "user", "content": "hello"}]


def test_tour(serve):
    base = serve(FakeFrontend(), served_model_names=("org/fake", "alias"))
    openai_tour(f"{base}/v1", "org/fake")


def test_tour_with_a_key_and_a_root_path(serve):
    base = serve(FakeFrontend(), api_keys=("first", "second"), root_path="/llm")
    openai_tour(f"{base}/v1", "fake-model", api_key="second")
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=f"{base}/v1", api_key="third", max_retries=0).models.list()


def test_an_error_inside_a_stream_reaches_the_client(serve):
    base = serve(FakeFrontend(Faults(fail_after_tokens=2)))
    client = openai.OpenAI(base_url=f"{base}/v1", api_key="none", max_retries=0)
    stream = client.chat.completions.create(model="fake-model", messages=MESSAGES, stream=True, max_tokens=9)
    texts = []
    with pytest.raises(openai.APIError, match="step failed") as error:  # noqa: PT012 (the iteration is the point)
        for chunk in stream:
            texts.append(chunk.choices[0].delta.content)
    assert len(texts) == 3  # role, two tokens
    assert "secret" not in str(error.value)
    assert error.value.code == "engine_died"


def test_overload_and_retry_after(serve):
    base = serve(FakeFrontend(Faults(overloaded=True)))
    client = openai.OpenAI(base_url=f"{base}/v1", api_key="none", max_retries=0)
    with pytest.raises(openai.RateLimitError) as error:
        client.chat.completions.create(model="fake-model", messages=MESSAGES)
    assert error.value.response.headers["retry-after"] == "7"


def test_request_id_is_the_answers_id(serve):
    base = serve(FakeFrontend())
    answer = httpx.post(f"{base}/v1/completions", json={"prompt": "a", "max_tokens": 1})
    assert answer.headers["x-request-id"] == answer.json()["id"]
