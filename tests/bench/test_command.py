"""`jaxserve bench` from the command line, over the fake frontend where a model would be needed."""

import json

import pytest
from fake_frontend import FakeFrontend  # pyright: ignore[reportMissingImports]

from jaxserve.cli.bench import engine_arguments, loopback_server
from jaxserve.cli.main import run_command
from jaxserve.config import EngineConfig


def test_host_prints_json(capsys):
    assert (
        run_command(["bench", "host", "--num-seqs", "2", "--num-steps", "3", "--num-warmup-steps", "1", "--json"]) == 0
    )
    content = json.loads(capsys.readouterr().out)
    assert content["settings"]["running requests"] == 2
    assert content["distributions"][0]["name"] == "total"
    assert content["distributions"][0]["target"]["text"] == "≤ 1.5"


def test_host_prints_a_table(capsys):
    assert run_command(["bench", "host", "--num-seqs", "2", "--num-steps", "3"]) == 0
    assert "fill inputs" in capsys.readouterr().out


def test_serve_loads_a_running_server(capsys):
    frontend = FakeFrontend()
    with loopback_server(frontend) as url:
        sizes = ["--num-prompts", "3", "--input-len", "4", "--output-len", "2", "--vocab-size", "200"]
        assert run_command(["bench", "serve", "--base-url", url, *sizes, "--request-rate", "500", "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert content["notes"] == ["3 requests succeeded, 0 failed"]
    assert content["settings"]["request rate"] == "500/s, Poisson"
    assert len(frontend.submitted) == 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--base-url", "http://127.0.0.1:9", "--dtype", "float32"], "--dtype would configure an engine"),
        (["--base-url", "http://127.0.0.1:9", "tiny"], "MODEL would configure an engine"),
        (["--model", "tiny"], "describe a server at --base-url"),
        (["--base-url", "http://127.0.0.1:9", "--request-rate", "0"], "--request-rate must be above 0"),
    ],
)
def test_options_without_effect_are_refused(arguments, message, capsys):
    assert run_command(["bench", "serve", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_startup_refuses_a_compilation_cache(capsys):
    assert run_command(["bench", "startup", "--compilation-cache-dir", "x"]) == 2
    assert "leave --compilation-cache-dir out" in capsys.readouterr().err


def test_a_configuration_is_written_as_arguments(tmp_path):
    config = EngineConfig(
        model="tiny",
        max_num_seqs=4,
        overlap=False,
        deterministic=True,
        chat_template="-{{ x }}",
        cache_dir=tmp_path,
        compilation_cache_dir=tmp_path,
    )
    assert engine_arguments(config) == [
        "tiny",
        "--max-num-seqs=4",
        "--no-overlap",
        "--deterministic",
        "--chat-template=-{{ x }}",
        f"--cache-dir={tmp_path}",
    ]
    assert engine_arguments(EngineConfig(model="tiny")) == ["tiny"]


def test_without_a_command_the_targets_are_measured(monkeypatch):
    measured = []
    monkeypatch.setattr("jaxserve.bench.host.bench_host", lambda **sizes: measured.append(sizes) or _stop())
    assert run_command(["bench"]) == 1
    assert measured == [{"num_seqs": 256, "num_steps": 1000, "num_warmup_steps": 100}]


def _stop():
    raise RuntimeError("enough")
