"""The server over the real model: the openai client's tour, concurrent clients, and clients that go away."""

import asyncio
import os
import re
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest
from loopback import running_server
from openai import AsyncOpenAI, OpenAI
from openai_tour import openai_tour

from jaxserve.config import EngineConfig
from jaxserve.engine.progress import Silent
from jaxserve.frontend import Frontend
from jaxserve.offline import start_frontend
from jaxserve.server.options import ServerOptions

MODEL = "smollm2"
PROMPTS = ["The sea is", "Once upon a time", "def add(a, b):", "Water boils at", "The capital of Spain is", "My dog"]


@pytest.fixture(scope="module")
def frontend(smollm2_path: Path) -> Iterator[Frontend]:
    config = EngineConfig(
        model=str(smollm2_path),
        max_model_len=512,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        compilation_cache_dir=Path(os.environ["JAX_COMPILATION_CACHE_DIR"]),
    )
    frontend = start_frontend(config, Silent(), warm_up=True)
    yield frontend
    assert frontend.failure is None
    assert frontend.stats().compiles_after_ready_total == 0
    frontend.close()


@pytest.fixture(scope="module")
def url(frontend: Frontend) -> Iterator[str]:
    with running_server(frontend, ServerOptions(served_model_names=(MODEL,))) as url:  # type: ignore[arg-type]
        yield url


def wait_until_idle(frontend: Frontend) -> None:
    """Waits for the aborted requests' last step; every page must come back."""
    deadline = time.monotonic() + 60
    while frontend.stats().num_running or frontend.stats().num_waiting or frontend.stats().running_pages:
        assert time.monotonic() < deadline, frontend.stats()
        time.sleep(0.02)
    stats = frontend.stats()
    assert stats.free_pages + stats.cached_pages == stats.total_pages


def test_the_openai_client_takes_the_tour(url: str, frontend: Frontend):
    openai_tour(f"{url}/v1", MODEL)
    wait_until_idle(frontend)


def test_an_idle_server_leaves_the_cores_alone(url: str, frontend: Frontend):
    """No thread of the pool, of the engine or of the server spins: over two seconds, less than 5 % of one core."""
    body = {"model": MODEL, "prompt": "x", "max_tokens": 4, "ignore_eos": True}
    assert httpx.post(f"{url}/v1/completions", json=body, timeout=60).status_code == 200
    wait_until_idle(frontend)
    before = time.process_time()
    time.sleep(2.0)
    assert time.process_time() - before < 0.1


def test_concurrent_clients_get_what_they_would_get_alone(url: str):
    """24 clients over 4 slots, half of them streaming; each answer equals the one given alone."""

    async def ask(client: AsyncOpenAI, prompt: str, stream: bool) -> str:
        options = {"model": MODEL, "prompt": prompt, "max_tokens": 10, "temperature": 0.7, "seed": 11}
        if not stream:
            return (await client.completions.create(**options)).choices[0].text  # type: ignore[call-overload]
        chunks = await client.completions.create(**options, stream=True)  # type: ignore[call-overload]
        return "".join([chunk.choices[0].text async for chunk in chunks if chunk.choices])

    async def both() -> tuple[list[str], list[str]]:
        async with AsyncOpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0, timeout=120) as client:
            alone = [await ask(client, prompt, False) for prompt in PROMPTS]
            jobs = [ask(client, prompt, i % 2 == 0) for i in range(4) for prompt in PROMPTS]
            return alone, await asyncio.gather(*jobs)

    alone, together = asyncio.run(both())
    assert together == alone * 4


@pytest.mark.parametrize("after_chunks", [0, 1, 3])
def test_a_client_that_goes_away_gives_its_pages_back(url: str, frontend: Frontend, after_chunks: int):
    """Closed while waiting for the first token, and in the middle of the stream."""
    body = {"model": MODEL, "prompt": "Count: 1 2 3", "max_tokens": 400, "stream": True, "ignore_eos": True, "n": 2}
    before = frontend.stats().requests_finished_total["abort"]
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as response:
        assert response.status_code == 200
        lines = response.iter_lines()
        for _ in range(2 * after_chunks):
            next(lines)
    deadline = time.monotonic() + 60  # both may reach the engine only after the client has gone
    while frontend.stats().requests_finished_total["abort"] < before + 2 and time.monotonic() < deadline:
        time.sleep(0.02)
    wait_until_idle(frontend)
    assert frontend.stats().requests_finished_total["abort"] == before + 2


def test_a_client_that_dies_before_the_answer_gives_its_pages_back(url: str, frontend: Frontend):
    """A plain socket that sends a request without streaming and hangs up."""
    host, port = url.removeprefix("http://").split(":")
    body = b'{"model":"smollm2","prompt":"Tell me all","max_tokens":400,"ignore_eos":true}'
    before = frontend.stats().requests_finished_total["abort"]
    with socket.create_connection((host, int(port))) as client:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        client.sendall(head.encode() + f"Content-Length: {len(body)}\r\n\r\n".encode() + body)
        while not frontend.stats().num_running:
            time.sleep(0.01)
    wait_until_idle(frontend)
    assert frontend.stats().requests_finished_total["abort"] == before + 1


def test_bad_requests_leave_the_server_alive(url: str):
    bad = [
        {"model": MODEL, "prompt": "x", "temperature": "hot"},
        {"model": MODEL, "prompt": "x", "n": 0},
        {"model": "nobody", "prompt": "x"},
        {"model": MODEL, "prompt": "word " * 2000},
        {"model": MODEL, "prompt": [[10**7]]},
        {"model": MODEL, "prompt": "x", "logit_bias": {"10000000": 1}},
        {"model": MODEL, "prompt": "x", "no_such_field": 1},
    ]
    for body in bad:
        response = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
        assert response.status_code in (400, 404), response.text
        assert len(response.json()["error"]["message"].splitlines()) == 1
    nan = httpx.post(
        f"{url}/v1/completions",
        content=b'{"prompt": "x", "temperature": NaN}',
        headers={"Content-Type": "application/json"},
    )
    assert nan.status_code == 400
    good = httpx.post(f"{url}/v1/completions", json={"model": MODEL, "prompt": "x", "max_tokens": 1}, timeout=60)
    assert good.status_code == 200


def test_metrics_and_configuration(url: str):
    metrics = httpx.get(f"{url}/metrics").text
    assert re.search(r"^jaxserve:compiles_after_ready_total(\{.*\})? 0\.0$", metrics, re.MULTILINE), metrics
    assert "jaxserve:generation_tokens_total" in metrics
    text = str(httpx.get(f"{url}/v1/config").json())
    assert "in tiles for the CPU kernels" in text or "expanded to float32" in text
    assert "max_num_seqs" in text


def test_megabytes_of_prompt_are_refused_before_they_are_tokenized(url: str, frontend: Frontend, monkeypatch):
    monkeypatch.setattr("jaxserve.tokens.tokenizer.Tokenizer.encode", None)
    monkeypatch.setattr("jaxserve.frontend.frontend.encode_chat", None)
    text = "word " * 400_000
    bodies = {"completions": {"prompt": text}, "chat/completions": {"messages": [{"role": "user", "content": text}]}}
    for path, body in bodies.items():
        response = httpx.post(f"{url}/v1/{path}", json=body, timeout=60)
        assert response.status_code == 400
        assert response.json()["error"]["code"] == "context_length_exceeded"


def test_tools_are_refused_by_a_template_without_a_place_for_them(url: str):
    body = {
        "messages": [{"role": "user", "content": "Weather?"}],
        "tools": [{"type": "function", "function": {"name": "weather", "parameters": {}}}],
    }
    response = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "tools"


def test_embeddings_are_those_of_each_text_alone_and_tell_meanings_apart(url: str, frontend: Frontend):
    """Three texts at once beside a running stream; vectors of length 1, the same as those of each alone."""
    texts = ["The cat sleeps on the sofa.", "A kitten naps on the couch.", "Interest rates rose by half a percent."]
    body = {"model": MODEL, "prompt": "Count: 1 2 3", "max_tokens": 60, "stream": True, "ignore_eos": True}
    with OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0, timeout=60) as client:
        alone = [client.embeddings.create(model=MODEL, input=text).data[0].embedding for text in texts]
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as response:
            next(response.iter_lines())
            together = client.embeddings.create(model=MODEL, input=texts)
    vectors = np.asarray([each.embedding for each in together.data])
    assert vectors.shape == (3, frontend.embedding_size)
    np.testing.assert_allclose(vectors, alone, atol=2e-3)  # activations are rounded to 8 bits by the CPU kernels
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1.0, atol=1e-6)
    centred = vectors - vectors.mean(axis=0)  # a language model's states share a large common direction
    similar = centred @ centred.T
    assert similar[0, 1] > similar[0, 2]
    assert similar[0, 1] > similar[1, 2]
    wait_until_idle(frontend)
