"""Two servers under the same load: what is sent to both, what is counted, and the ratios."""

import json
import sys

import pytest
from fake_frontend import FakeFrontend  # pyright: ignore[reportMissingImports]
from loopback import running_server  # pyright: ignore[reportMissingImports]

from jaxserve.bench.against import LoadFigures, bench_against, one_token_words, text_requests
from jaxserve.bench.client import request_body
from jaxserve.bench.errors import BenchmarkFailed
from jaxserve.bench.serve import Load
from jaxserve.bench.servers import free_port, llama_cpp_server, running
from jaxserve.bench.workload import Planned, Workload
from jaxserve.cli.main import run_command
from jaxserve.engine.progress import Silent
from jaxserve.errors import ConfigError
from jaxserve.server.options import ServerOptions

WORK = Workload(num_prompts=3, input_len=5, output_len=4, vocab_size=100)


class Words:
    """Half of its tokens are words."""

    vocab_size = 300
    eos_token_ids = frozenset({7, 2})

    def decode(self, ids: list[int]) -> str:
        return "".join(f" w{chr(97 + i % 26)}{chr(97 + i // 26)}" if i < 150 else f"{i}" for i in ids)


def _texts(number=0):
    return text_requests(Words(), WORK.requests(number), one_token_words(Words()), number)


def test_texts_are_made_of_words_of_one_token():
    assert one_token_words(Words()) == list(range(150))
    for made, planned in zip(_texts(), WORK.requests(), strict=True):
        assert made.text is not None
        assert made.text.count(" w") == len(made.prompt_token_ids) == len(planned.prompt_token_ids)
        assert (made.output_len, made.banned_token_ids) == (planned.output_len, (2, 7))
    assert _texts() == _texts()
    assert {r.text for r in _texts()}.isdisjoint({r.text for r in _texts(1)})


def test_a_vocabulary_without_words_is_refused():
    few = Words()
    few.vocab_size = 50
    with pytest.raises(ConfigError, match="has 50 words"):
        one_token_words(few)


def test_a_text_goes_out_as_text_without_an_end_before_its_length():
    body = request_body("m", Planned(prompt_token_ids=[1], output_len=3, text=" a", banned_token_ids=(2, 7)))
    assert (body["prompt"], body["max_tokens"], body["logit_bias"]) == (" a", 3, {"2": -100, "7": -100})
    body = request_body("m", Planned(prompt_token_ids=[1], output_len=3))
    assert body["prompt"] == [1]
    assert "logit_bias" not in body


def test_both_servers_get_the_same_in_turns():
    frontends = [FakeFrontend(), FakeFrontend()]
    with running_server(frontends[0], ServerOptions()) as own, running_server(frontends[1], ServerOptions()) as other:
        loads = {"jaxserve": Load(base_url=own), "b": Load(base_url=other)}
        report = bench_against(loads, [_texts(0), _texts(1)], _texts(-1)[:1], Silent(), WORK)
    sent = [sorted(tuple(g.prompt_token_ids) for g in frontend.submitted) for frontend in frontends]
    assert sent[0] == sent[1]
    assert len(sent[0]) == 7
    figures = {figure.name: figure.value for figure in report.figures}
    rounds = {name: [one["tokens_per_second"] for one in report.samples[name]] for name in ("jaxserve", "b")}
    ratios = [a / b for a, b in zip(rounds["jaxserve"], rounds["b"], strict=True)]
    assert figures["generated tokens: jaxserve over b"].max == pytest.approx(max(ratios))
    assert figures["TTFT p99: jaxserve over b"].count == 2
    assert {d.name: d.value.count for d in report.distributions} == {"TTFT: jaxserve": 6, "TTFT: b": 6}
    json.dumps(report.as_dict())


def test_a_server_that_answers_nothing_is_no_measurement():
    with running_server(FakeFrontend(), ServerOptions()) as own:
        loads = {"jaxserve": Load(base_url=own), "b": Load(base_url="http://127.0.0.1:9", model="m")}
        with pytest.raises(BenchmarkFailed, match=r"b answered none of 3 requests: .*ConnectError"):
            bench_against(loads, [_texts()], _texts(), Silent(), WORK)


def test_failures_are_told(monkeypatch):
    one = LoadFigures(tokens_per_second=2.0, first_token_seconds=[1.0], num_failed=1, num_wrong_length=2)
    monkeypatch.setattr("jaxserve.bench.against._figures_of", lambda name, load, requests: one)
    loads = {"jaxserve": Load(base_url="http://a"), "b": Load(base_url="http://b")}
    report = bench_against(loads, [[], []], [], Silent(), WORK)
    assert "b: 2 requests failed and 4 answers have another length than asked for" in report.notes


SERVE = """
import http.server, sys
class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers(); self.wfile.write(b"{}")
print("starting", flush=True)
server = http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Answer)
print("up at http://127.0.0.1:" + sys.argv[1], flush=True)
server.serve_forever()
"""


def _address(output):
    return output.split("up at ")[1].split()[0] if "up at " in output and output.endswith("\n") else None


def test_a_server_is_up_while_the_block_runs():
    port = free_port()
    with running([sys.executable, "-c", SERVE, str(port)], _address, 60.0) as url:
        assert url == f"http://127.0.0.1:{port}"
    with running([sys.executable, "-c", SERVE, str(port)], _address, 60.0):
        pass  # the port is free again


@pytest.mark.parametrize(
    ("code", "timeout", "message"),
    [
        ("raise SystemExit('no model')", 60.0, "ended with exit code 1 before it was ready; it printed: no model"),
        ("import time; time.sleep(60)", 0.1, r"was not ready in time; it printed: \(nothing\)"),
    ],
)
def test_a_server_that_does_not_come_up_is_one_line(code, timeout, message):
    with (
        pytest.raises(BenchmarkFailed, match=message),
        running([sys.executable, "-c", code], _address, timeout),
    ):
        pass


def test_the_peers_server_needs_its_package(tmp_path):
    sizes = {"num_threads": 1, "max_len": 64, "timeout_seconds": 60.0}
    with (
        pytest.raises(BenchmarkFailed, match="llama_cpp"),
        llama_cpp_server(sys.executable, tmp_path / "m.gguf", **sizes),
    ):
        pass
    with pytest.raises(BenchmarkFailed, match="No such file"), llama_cpp_server("none/python", tmp_path, **sizes):
        pass


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--num-rounds", "2"], "--num-rounds needs --against or --peer"),
        (["--peer-python", "python"], "--peer-python needs --against or --peer"),
        (["--against", "http://a", "--base-url", "http://b"], "--base-url has no effect with --against or --peer"),
        (["--peer", "llama-cpp-server", "--model", "m"], "--model has no effect"),
        (["--peer", "llama-cpp-server", "--against", "http://a"], "give one of them"),
    ],
)
def test_options_without_effect_are_refused(arguments, message, capsys):
    assert run_command(["bench", "serve", *arguments]) == 2
    assert message in capsys.readouterr().err
