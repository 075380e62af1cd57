"""A client that goes away takes its generations with it, in every phase."""

import json
import socket
import time
from typing import Any

import httpx
import pytest
from fake_frontend import FakeFrontend, Faults

NEVER = 3600.0


def connect(base: str, path: str, body: dict) -> socket.socket:
    """A client that has sent its request and holds the connection open."""
    host, port = base.removeprefix("http://").split(":")
    client = socket.create_connection((host, int(port)), timeout=5)
    payload = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(payload)}\r\n\r\n"
    )
    client.sendall(head.encode() + payload)
    return client


def wait_for(condition) -> None:
    deadline = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < deadline, "did not happen in 5 s"
        time.sleep(0.005)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize("phase", ["first token", "later token"])
def test_disconnect_aborts(serve, stream, path, phase):
    delays: dict[str, Any] = (
        {"first_token_delay_seconds": NEVER} if phase == "first token" else {"token_delay_seconds": 0.02}
    )
    frontend = FakeFrontend(Faults(**delays))
    prompt = {"messages": [{"role": "user", "content": "x"}]} if "chat" in path else {"prompt": ["x", "y"]}
    client = connect(serve(frontend), path, {**prompt, "stream": stream, "n": 2, "max_tokens": 10**6})
    num_generations = 1 if "chat" in path else 2
    wait_for(lambda: len(frontend.submitted) == num_generations)
    if stream:
        assert client.recv(15) == b"HTTP/1.1 200 OK"
    time.sleep(0.05)
    assert not any(g.aborted.is_set() for g in frontend.submitted)
    client.close()
    wait_for(lambda: all(g.aborted.is_set() for g in frontend.submitted))


def test_a_client_gone_while_it_sends_its_body(serve):
    frontend = FakeFrontend()
    base = serve(frontend)
    host, port = base.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as client:
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n")
        client.sendall(b"Content-Length: 500\r\n\r\n{")
    assert httpx.get(f"{base}/health").status_code == 200
    assert frontend.submitted == []


def test_a_finished_generation_is_not_aborted(serve):
    frontend = FakeFrontend()
    base = serve(frontend)
    for stream in (False, True):
        httpx.post(f"{base}/v1/completions", json={"prompt": "a", "max_tokens": 2, "stream": stream})
    assert [g.aborted.is_set() for g in frontend.submitted] == [False, False]


def test_an_error_in_one_prompt_aborts_the_others(serve):
    frontend = FakeFrontend(Faults(fail_after_tokens=2, token_delay_seconds=0.005))
    httpx.post(f"{serve(frontend)}/v1/completions", json={"prompt": ["a", "b"], "max_tokens": 9, "stream": True})
    wait_for(lambda: all(g.aborted.is_set() for g in frontend.submitted))
