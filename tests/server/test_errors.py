"""Every error in OpenAI's form: bodies, limits, keys, unknown paths, engine failures."""

import json
import socket

import httpx
import pytest
from fake_frontend import FakeFrontend, Faults
from loopback import running_server

from checkpoints.errors import CheckpointError
from jaxserve.errors import ConfigError, EngineDied, JaxserveError, ShuttingDown
from jaxserve.server.error_responses import describe
from jaxserve.server.options import ServerOptions

TEXT = "/v1/completions"
JSON = {"Content-Type": "application/json"}


def assert_openai_form(answer: httpx.Response, status: int, code: str | None = None) -> dict:
    assert answer.status_code == status
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == code
    assert "\n" not in error["message"]
    return error


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"[1]", b"null", b"\xff", b'{"prompt": NaN}', b'{"prompt":"a","temperature": Infinity}',
        b'{"prompt":"a","temperature": 1e999}', b'{"prompt":"a","temperature": -Infinity}',
        b'{"prompt": "\\ud800"}', b"[" * 100_000, b'{"prompt":"a","seed":' + b"9" * 5000 + b"}",
    ],
)  # fmt: skip
def test_bad_json(serve, body):
    frontend = FakeFrontend()
    assert_openai_form(httpx.post(serve(frontend) + TEXT, content=body, headers=JSON), 400)
    assert frontend.submitted == []


def test_other_content_types_are_refused(serve):
    base = serve(FakeFrontend())
    body = json.dumps({"prompt": "a"})
    for headers in ({"Content-Type": "text/plain"}, {}):
        answer = httpx.post(base + TEXT, content=body, headers=headers)
        assert_openai_form(answer, 415, "unsupported_media_type")
    utf8 = {"Content-Type": "application/json; charset=utf-8"}
    assert httpx.post(base + TEXT, content=body, headers=utf8).status_code == 200


def test_body_limit_by_header_and_by_chunks(serve):
    base = serve(FakeFrontend(), max_body_bytes=100)
    body = json.dumps({"prompt": "a" * 90}).encode()
    assert len(body) > 100
    assert_openai_form(httpx.post(base + TEXT, content=body, headers=JSON), 413, "body_too_large")
    chunks = (body[i : i + 10] for i in range(0, len(body), 10))
    assert_openai_form(httpx.post(base + TEXT, content=chunks, headers=JSON), 413, "body_too_large")
    fits = json.dumps({"prompt": "a", "max_tokens": 1}).encode()
    assert httpx.post(base + TEXT, content=iter([fits[:5], fits[5:]]), headers=JSON).status_code == 200


def test_announced_body_is_refused_before_it_is_sent(serve):
    host, port = serve(FakeFrontend(), max_body_bytes=100).removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=5) as client:
        client.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b"Content-Length: 99999999\r\n\r\n"
        )
        assert client.recv(100).startswith(b"HTTP/1.1 413")


def test_unknown_paths_and_methods(serve):
    base = serve(FakeFrontend())
    assert_openai_form(httpx.get(f"{base}/v1/nothing"), 404)
    assert_openai_form(httpx.get(f"{base}/docs"), 404)
    answer = httpx.get(base + TEXT)
    assert_openai_form(answer, 405)
    assert answer.headers["allow"] == "POST"
    assert_openai_form(httpx.get(f"{base}/v1/models/none"), 404, "model_not_found")


def test_api_keys(serve):
    base = serve(FakeFrontend(), api_keys=("one", "two-é"))
    for path in ("/health", "/metrics"):
        assert httpx.get(base + path).status_code == 200
    for headers in ({}, {"Authorization": "Bearer"}, {"Authorization": "Bearer on"}, {"Authorization": "Basic one"}):
        answer = httpx.get(f"{base}/v1/models", headers=headers)
        assert_openai_form(answer, 401, "invalid_api_key")
        assert answer.headers["www-authenticate"] == "Bearer"
    for path in ("/v1/config", "/version", "/v1/models/fake-model"):
        assert httpx.get(base + path).status_code == 401
        assert httpx.get(base + path, headers={"Authorization": "Bearer one"}).status_code == 200
    assert httpx.post(base + TEXT, content=b"{").status_code == 401  # the body of a stranger is not read
    assert httpx.post(f"{base}/tokenize", json={}).status_code == 401


def test_keys_that_are_not_ascii(serve):
    base = serve(FakeFrontend(), api_keys=("two-é",))
    key = httpx.Headers({"Authorization": "Bearer two-é"}, encoding="utf-8")
    assert httpx.get(f"{base}/v1/models", headers=key).status_code == 200


def test_engine_death_is_told_once_known(serve):
    frontend = FakeFrontend(Faults(fail_after_tokens=1))
    base = serve(frontend)
    error = assert_openai_form(httpx.post(base + TEXT, json={"prompt": "a"}), 500, "engine_died")
    assert error["message"] == "step failed: out of memory"
    frontend.failure = RuntimeError("dead")
    assert httpx.get(f"{base}/health").status_code == 503
    assert_openai_form(httpx.post(base + TEXT, json={"prompt": "a"}), 500, "engine_died")


def test_a_defect_says_nothing_of_the_inside(serve):
    frontend = FakeFrontend(Faults(fail_after_tokens=0, failure=KeyError("secret path /srv/x")))
    base = serve(frontend)
    error = assert_openai_form(httpx.post(base + TEXT, json={"prompt": "a"}), 500, "internal")
    assert "secret" not in error["message"]
    streamed = httpx.post(base + TEXT, json={"prompt": "a", "stream": True})
    assert streamed.status_code == 200
    assert "secret" not in streamed.text
    assert json.loads(streamed.text.strip().removeprefix("data: "))["error"]["code"] == "internal"
    assert "[DONE]" not in streamed.text


def test_a_request_the_engine_gave_up(serve):
    base = serve(FakeFrontend(Faults(finish_with_error=True)))
    assert_openai_form(httpx.post(base + TEXT, json={"prompt": "a"}), 500, "generation_failed")


def test_all_prompts_are_taken_or_none(serve):
    frontend = FakeFrontend(Faults(refuse_after=2))
    answer = httpx.post(serve(frontend) + TEXT, json={"prompt": ["a", "b", "c"]})
    assert_openai_form(answer, 429, "overloaded")
    assert [g.aborted.is_set() for g in frontend.submitted] == [True, True]


def test_cors_is_off_until_asked_for(serve):
    preflight = {"Origin": "http://page", "Access-Control-Request-Method": "POST"}
    off = httpx.options(serve(FakeFrontend()) + TEXT, headers=preflight)
    assert off.status_code == 405
    base = serve(FakeFrontend(), allowed_origins=("http://page",), api_keys=("k",))
    on = httpx.options(base + TEXT, headers=preflight)
    assert on.status_code == 200
    assert on.headers["access-control-allow-origin"] == "http://page"


def test_every_error_of_the_tree_has_an_answer():
    assert describe(ShuttingDown("x")).headers() == {"Retry-After": "5"}
    assert describe(EngineDied("")).message == "EngineDied"
    assert describe(CheckpointError("bad file")).status == 500
    assert describe(JaxserveError("root")).status == 500


@pytest.mark.parametrize(
    "wrong",
    [{"port": 70000}, {"max_body_bytes": 0}, {"drain_timeout_seconds": -1.0}, {"root_path": "x"}, {"api_keys": ("",)}],
)
def test_options_that_cannot_work(wrong):
    with pytest.raises(ConfigError):
        ServerOptions(**wrong)


def test_a_request_that_can_never_be_queued_is_no_429():
    """Repeating it would not help: 400, although 429 is the answer to a queue that is full for now."""
    with running_server(FakeFrontend(), ServerOptions()) as url:
        response = httpx.post(f"{url}/v1/completions", json={"prompt": ["a"] * 501, "n": 2, "max_tokens": 1})
    assert response.status_code == 400
    assert "501 prompts with n=2 exceed the 1,000 sequences" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("messages", "says"),
    [([], "messages must not be empty"), ([{"role": "user", "content": None}], "role 'user' has no content")],
)
def test_messages_that_say_nothing(messages, says):
    with running_server(FakeFrontend(), ServerOptions()) as url:
        response = httpx.post(f"{url}/v1/chat/completions", json={"messages": messages})
    assert response.status_code == 400
    assert says in response.json()["error"]["message"]


def test_a_negative_token_id_is_called_one():
    with running_server(FakeFrontend(), ServerOptions()) as url:
        response = httpx.post(f"{url}/v1/completions", json={"prompt": [5, -1]})
    assert response.json()["error"]["message"] == "prompt: token ids are 0 or more, got -1"
