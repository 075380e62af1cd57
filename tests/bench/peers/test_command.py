"""`jaxserve bench peers` from the command line, its engines replaced by the fake one."""

import json

import pytest
from fakes import fake_command, logged  # pyright: ignore[reportMissingImports]

from jaxserve.bench.peers import bench, engines
from jaxserve.cli.bench_peers import chosen_options, named_pythons
from jaxserve.cli.main import run_command
from jaxserve.config import EngineConfig
from jaxserve.errors import ConfigError

SIZES = ["--num-rounds", "1", "--batch-sizes", "1,2", "--prompt-tokens", "6", "--decode-tokens", "3", "--threads", "1"]


@pytest.fixture
def model(root_fixtures):
    return str(root_fixtures / "gguf" / "gguf_llama_legacy" / "model.gguf")


@pytest.fixture(autouse=True)
def _fakes(monkeypatch, tmp_path):
    log = str(tmp_path / "log")
    monkeypatch.setattr(bench, "own_command", lambda: fake_command("jaxserve", log=log))
    monkeypatch.setattr(engines, "peer_command", lambda name, python: fake_command(name, missing=python == "bare"))


def test_the_whole_command_writes_json(model, tmp_path, capsys):
    out = tmp_path / "found.json"
    chosen = ["--peers", "llama.cpp, openvino", "--peer-python", "openvino=bare"]
    assert run_command(["bench", "peers", model, *SIZES, *chosen, "--kernels", "cpu", "--out", str(out), "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert content == json.loads(out.read_text())
    assert {row["engine"]: row["state"] for row in content["grids"][1]["rows"]} == {
        "jaxserve": "",
        "llama.cpp": "",
        "openvino": "not installed: pip install some-package",
    }
    assert [f["name"] for f in content["figures"] if ": jaxserve over" in f["name"]] == [
        "decode 1: jaxserve over llama.cpp",
        "decode 2: jaxserve over llama.cpp",
        "prefill 6: jaxserve over llama.cpp",
    ]
    load = logged(tmp_path / "log")[0]["load"]
    assert load[:3] == [1, 2, 19]
    assert load[3]["kernels"] == "cpu"


def test_the_table_names_what_is_missing(model, capsys):
    chosen = ["--peers", "transformers", "--peer-python", "transformers=bare"]
    assert run_command(["bench", "peers", model, *SIZES, *chosen]) == 0
    text = capsys.readouterr().out
    assert "not installed: pip install some-package" in text
    assert "median tokens/s" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--peers", "vllm"], "no peer 'vllm'"),
        (["--peer-python", "llama.cpp"], "--peer-python takes NAME=PATH"),
        (["--batch-sizes", "1;2"], "--batch-sizes takes whole numbers"),
        (["--out", "no/such/folder/a.json"], "there is no folder no/such/folder"),
        (["--requantize", "Q9"], "--requantize must be one of"),
        (["--max-num-seqs", "1"], "--max-num-seqs must hold the largest batch"),
    ],
)
def test_options_that_cannot_work_are_refused(model, arguments, message, capsys):
    assert run_command(["bench", "peers", model, *SIZES, *arguments]) == 2
    assert message in capsys.readouterr().err


def test_interpreters_are_named_once():
    assert named_pythons(["llama.cpp=a/python", "openvino=b=c"]) == {"llama.cpp": "a/python", "openvino": "b=c"}
    with pytest.raises(ConfigError, match="once a name"):
        named_pythons(["openvino=a", "openvino=b"])


def test_our_options_are_what_differs_from_the_defaults(tmp_path):
    config = EngineConfig(model="m", kernels="cpu", cache_dir=tmp_path, enable_prefix_caching=False)
    assert chosen_options(config) == {"kernels": "cpu", "cache_dir": str(tmp_path)}
