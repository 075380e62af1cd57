"""The load generator against the real server code over a fake frontend, and against servers that misbehave."""

import asyncio

import pytest
from fake_frontend import FakeFrontend, Faults  # pyright: ignore[reportMissingImports]
from loopback import running_server  # pyright: ignore[reportMissingImports]

from jaxserve.bench.client import Failure, _Seen, _timing, complete, open_client
from jaxserve.bench.errors import BenchmarkFailed
from jaxserve.bench.serve import Load, bench_serve, run_load
from jaxserve.bench.timing import RequestTiming
from jaxserve.bench.workload import Planned, Workload
from jaxserve.errors import ConfigError
from jaxserve.server.options import ServerOptions

WORK = Workload(num_prompts=6, input_len=5, output_len=4, vocab_size=200)


@pytest.fixture
def serve():
    def start(frontend, **options):
        return running_server(frontend, ServerOptions(drain_timeout_seconds=0.1, **options))

    return start


def test_every_request_is_sent_and_counted(serve):
    frontend = FakeFrontend()
    with serve(frontend) as url:
        report = bench_serve(Load(base_url=url), WORK, num_warmups=2)
    assert len(frontend.submitted) == 8
    sent = {tuple(g.prompt_token_ids) for g in frontend.submitted}
    assert sent >= {tuple(r.prompt_token_ids) for r in WORK.requests()}
    figures = {figure.name: figure.value.median for figure in report.figures}
    assert figures["failed requests"] == 0
    assert figures["generated tokens"] == pytest.approx(4 * figures["requests"])
    assert figures["prompt and generated tokens"] == pytest.approx(9 * figures["requests"])
    assert {d.name.split(",")[0]: d.value.count for d in report.distributions} == {
        "TTFT": 6,
        "TPOT": 6,
        "ITL": 18,
        "E2E": 6,
        "sent late": 6,
    }
    assert report.model["model"] == "fake-model"
    assert "6 requests succeeded, 0 failed" in report.notes


def test_failures_are_counted_by_reason(serve):
    with serve(FakeFrontend(Faults(refuse_after=4))) as url:
        report = bench_serve(Load(base_url=url), WORK, num_warmups=0)
    reasons = [note for note in report.notes if "failed" in note]
    assert reasons == ["4 requests succeeded, 2 failed: 2x HTTP 429 overloaded"]


def test_at_most_max_concurrency_requests_are_open(serve):
    frontend = FakeFrontend(Faults(token_delay_seconds=0.002))
    most = []
    submit = frontend.submit

    def counting(*args, **kwargs):
        generation = submit(*args, **kwargs)
        most.append(len(frontend.live))
        return generation

    frontend.submit = counting
    with serve(frontend) as url:
        bench_serve(Load(base_url=url, max_concurrency=2), WORK, num_warmups=0)
    assert max(most) == 2


def test_requests_are_not_sent_before_their_time(serve):
    frontend = FakeFrontend()
    with serve(frontend) as url:
        load = Load(base_url=url, model="fake-model", request_rate=200.0, seed=5)
        result = asyncio.run(run_load(load, WORK.requests(), []))
    assert all(isinstance(outcome, RequestTiming) for outcome in result.outcomes)
    sent = [outcome.sent for outcome in result.outcomes if isinstance(outcome, RequestTiming)]
    assert sent == sorted(sent)
    assert min(result.late_seconds) >= 0


def test_keys_are_sent(serve):
    with serve(FakeFrontend(), api_keys=("secret",)) as url:
        report = bench_serve(Load(base_url=url, api_key="secret"), WORK)
        assert "6 requests succeeded, 0 failed" in report.notes
        with pytest.raises(BenchmarkFailed, match="6x HTTP 401"):
            bench_serve(Load(base_url=url, api_key="wrong", model="fake-model"), WORK)


def test_a_server_that_is_not_there_is_said():
    with pytest.raises(BenchmarkFailed, match="gave no model"):
        bench_serve(Load(base_url="http://127.0.0.1:9"), WORK)
    with pytest.raises(BenchmarkFailed, match="no request of 6 succeeded: 6x connection: ConnectError"):
        bench_serve(Load(base_url="http://127.0.0.1:9", model="m"), WORK)


def test_an_engine_that_dies_is_a_failure(serve):
    with serve(FakeFrontend(Faults(fail_after_tokens=2))) as url, pytest.raises(BenchmarkFailed, match="error event"):
        bench_serve(Load(base_url=url), WORK)


def _answer(body: bytes):
    """What the client makes of a server that answers 200 with this body and closes."""

    async def run():
        async def respond(reader, writer):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n" + body)
            await writer.drain()
            writer.close()

        server = await asyncio.start_server(respond, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with server, open_client(f"http://127.0.0.1:{port}/v1", api_key=None, timeout_seconds=5.0) as client:
            return await complete(client, "m", Planned(prompt_token_ids=[1, 2], output_len=2))

    return asyncio.run(run())


TEXT = b'data: {"choices": [{"text": "a"}]}\n\n'


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (TEXT, "stream ended without [DONE]"),
        (b"data: nonsense\n\n", "event is no JSON"),
        (b"data: []\n\n", "event is no JSON object"),
        (b"data: [DONE]\n\n", "answer without a token"),
        (TEXT + b'data: {"error": {"code": "boom"}}\n\n', "error event boom"),
    ],
)
def test_broken_streams_are_failures(body, reason):
    assert _answer(body) == Failure(reason=reason)


def test_the_servers_count_of_tokens_wins_over_the_number_of_chunks():
    usage = b'data: {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 9}}\n\n'
    closing = b'data: {"choices": [{"text": "", "finish_reason": "length"}]}\n\n'
    timing = _answer(TEXT + TEXT + closing + usage + b"data: [DONE]\n\n")
    assert isinstance(timing, RequestTiming)
    assert (timing.num_prompt_tokens, timing.num_output_tokens, len(timing.arrivals)) == (7, 9, 2)
    timing = _answer(TEXT + TEXT + b"data: [DONE]\n\n")
    assert isinstance(timing, RequestTiming)
    assert (timing.num_prompt_tokens, timing.num_output_tokens) == (2, 2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"base_url": "localhost:1"}, "--base-url"),
        ({"max_concurrency": 0}, "--max-concurrency"),
        ({"request_rate": 0.0}, "--request-rate"),
    ],
)
def test_loads_that_cannot_be_sent_are_refused(change, message):
    with pytest.raises(ConfigError, match=message):
        Load(**{"base_url": "http://127.0.0.1:1"} | change)


@pytest.mark.parametrize(("reason", "count"), [("length", 4), ("stop", 3)])
def test_where_the_server_does_not_count_the_limit_does(reason, count):
    """llama-cpp-python's server sends no usage, and holds back increments that are no whole character."""
    seen = _Seen([1.0, 2.0, 3.0], finish_reason=reason)
    timing = _timing(0.0, seen, Planned(prompt_token_ids=[1, 2], output_len=4))
    assert isinstance(timing, RequestTiming)
    assert timing.num_output_tokens == count
