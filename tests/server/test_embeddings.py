"""POST /v1/embeddings: inputs of every form, both encodings, and what is refused."""

import base64
import threading
import time
from collections.abc import Iterator

import httpx
import numpy as np
import pytest
from fake_frontend import BOS, FakeFrontend, Faults
from loopback import running_server
from openai import OpenAI

from jaxserve.server.options import ServerOptions

PATH = "/v1/embeddings"


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[FakeFrontend, httpx.Client]]:
    frontend = FakeFrontend()
    with running_server(frontend, ServerOptions()) as base, httpx.Client(base_url=base) as client:
        yield frontend, client


@pytest.fixture
def frontend(served) -> FakeFrontend:
    served[0].submitted.clear()
    served[0].options.clear()
    return served[0]


@pytest.fixture
def post(served):
    return lambda body: served[1].post(PATH, json=body)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("ab", [[BOS, 97, 98]]),
        (["a", "b"], [[BOS, 97], [BOS, 98]]),
        ([5, 6], [[5, 6]]),
        ([[5], [6, 7]], [[5], [6, 7]]),
    ],
)
def test_inputs_of_every_form(post, frontend, given, expected):
    answer = post({"model": "fake-model", "input": given, "normalize": False, "user": "u"})
    assert answer.status_code == 200
    assert [g.prompt_token_ids for g in frontend.submitted] == expected
    num_tokens = sum(map(len, expected))
    assert answer.json() == {
        "object": "list",
        "data": [
            {"object": "embedding", "index": i, "embedding": [len(ids), ids[0], ids[-1], 0]}
            for i, ids in enumerate(expected)
        ],
        "model": "fake-model",
        "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
    }
    assert answer.headers["x-request-id"].startswith("embd-")
    assert frontend.live == set()


def test_both_encodings_hold_the_same_float32(post):
    plain = post({"input": [5, 6]}).json()["data"][0]["embedding"]
    coded = post({"input": [5, 6], "encoding_format": "base64"}).json()["data"][0]["embedding"]
    values = np.frombuffer(base64.b64decode(coded), "<f4")
    assert values.tolist() == plain
    assert np.linalg.norm(values) == pytest.approx(1.0, abs=1e-6)


def test_options_arrive(post, frontend):
    body = {"input": [5, 6], "pooling": "last", "normalize": False, "priority": 3, "cache_salt": "s", "dimensions": 3}
    assert post(body).json()["data"][0]["embedding"] == [2, 5, 6]
    assert frontend.submitted[0].pooling == "last"
    assert frontend.options == [{"priority": 3, "cache_salt": "s"}]
    post({"input": "a", "add_special_tokens": False})
    assert frontend.submitted[1].prompt_token_ids == [97]


def test_dimensions_cut_and_scale_again(post):
    vector = post({"input": [3, 4], "dimensions": 2}).json()["data"][0]["embedding"]
    assert vector == pytest.approx([2 / 13**0.5, 3 / 13**0.5])


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": 2}, "n"),
        ({"input": ""}, "input"),
        ({"input": ["a", ""]}, "input"),
        ({"input": []}, "input"),
        ({"input": [[]]}, "input"),
        ({"input": [1, "a"]}, "input"),
        ({"input": [-1]}, "input"),
        ({"input": None}, "input"),
        ({"input": {"a": 1}}, "input"),
        ({"input": [1] * 2048}, "input"),
        ({"input": ["a", "b" * 3000]}, "input"),
        ({"input": [[1]] * 1001}, "input"),
        ({"dimensions": 0}, "dimensions"),
        ({"dimensions": 5}, "dimensions"),
        ({"dimensions": 1.5}, "dimensions"),
        ({"encoding_format": "int8"}, "encoding_format"),
        ({"pooling": "cls"}, "pooling"),
        ({"normalize": "no"}, "normalize"),
        ({"stream": True}, "stream"),
    ],
)
def test_refused_fields_are_named_and_nothing_stays(post, frontend, fields, param):
    answer = post({"input": "a", **fields})
    error = answer.json()["error"]
    assert answer.status_code == 400
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert len(error["message"].splitlines()) == 1
    assert all(generation.aborted.is_set() for generation in frontend.submitted)


def test_other_errors_have_the_shapes_of_the_other_routes(post):
    assert post({}).json()["error"]["message"] == "field 'input' is required"
    wrong_model = post({"input": "a", "model": "other"})
    assert (wrong_model.status_code, wrong_model.json()["error"]["code"]) == (404, "model_not_found")


@pytest.mark.parametrize(
    ("faults", "status"), [(Faults(overloaded=True), 429), (Faults(finish_with_error=True), 500)], ids=str
)
def test_engine_faults(served, monkeypatch, faults, status):
    monkeypatch.setattr(served[0], "faults", faults)
    answer = served[1].post(PATH, json={"input": "a"})
    assert answer.status_code == status
    assert answer.json()["error"]["type"] in ("rate_limit_error", "server_error")


def test_a_shutdown_answers_503(serve):
    frontend = FakeFrontend(Faults(first_token_delay_seconds=30))
    base = serve(frontend)
    aborting = threading.Thread(target=_abort_when_submitted, args=(frontend,))
    aborting.start()
    answer = httpx.post(f"{base}{PATH}", json={"input": ["a", "b"]})
    aborting.join()
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "shutting_down"


def _abort_when_submitted(frontend: FakeFrontend) -> None:
    """What a shutdown does to requests that outlast its patience."""
    while len(frontend.submitted) < 2:
        time.sleep(0.005)
    for generation in frontend.submitted:
        generation.abort()


def test_the_openai_client_reads_both(served):
    with OpenAI(base_url=str(served[1].base_url.join("/v1")), api_key="x", max_retries=0) as client:
        default = client.embeddings.create(model="fake-model", input=["ab", "c"])  # asks for base64
        plain = client.embeddings.create(model="fake-model", input=["ab", "c"], encoding_format="float")
    assert [each.embedding for each in default.data] == [each.embedding for each in plain.data]
    assert default.usage.prompt_tokens == 5
