"""`jaxserve plan` on the command line, with a compiler that answers at once."""

import importlib.util
import json

import pytest
from fixture_files import FIXTURES

from jaxserve.cli.main import run_command
from jaxserve.planning import plans, plot

LLAMA, MIXTRAL = (str(FIXTURES / "configs" / name) for name in ("llama_3_8b", "mixtral_8x7b"))
SUM = {
    "kind": "all-reduce", "group": [0, 1], "count": 65, "bytes": 1e6, "wire_bytes": 1e6, "shape": "f32[32,4096]",
}  # fmt: skip
PROGRAM = {
    "flops": 1e12, "input_bytes": 10**9, "argument_bytes": 10**9, "temp_bytes": 10**8, "output_bytes": 10**6,
    "alias_bytes": 0, "collectives": [SUM],
}  # fmt: skip
KEYS = {
    "topology", "num_devices", "plan", "fits", "per_device", "kv_capacity_tokens", "collectives", "prefill", "decode",
    "cost_per_million_tokens", "compile_seconds",
}  # fmt: skip


@pytest.fixture
def compiled(monkeypatch) -> list:
    """The plans that were compiled, in order."""
    seen = []

    def compile_plan(request, environment, limit_seconds):
        seen.append((request.tensor, request.expert, request.data))
        extra = {"state_bytes": 100, "kv_cache_bytes": 10**9, "compile_seconds": 4.5, "host_memory_bytes": 10**9}
        return {"prefill": PROGRAM, "decode": PROGRAM, **extra}

    monkeypatch.setattr(plans, "compile_plan", compile_plan)
    return seen


def test_a_table_for_people(compiled, capsys):
    assert run_command(["plan", LLAMA, "--topology", "cpu:2", "-tp", "2", "--context", "4K", "--price", "2"]) == 0
    shown = capsys.readouterr()
    assert compiled == [(2, 1, 1)]
    assert "8.0B parameters, on cpu:2 (2 x cpu), tensor 2 x expert 1: 32 sequences of 4,096 tokens" in shown.out
    assert "warning: prefill: of 1,000,000,100 donated bytes" in " ".join(shown.out.split())
    assert "a million tokens at 2 per chip and hour: in " in shown.out
    assert "not a measurement" in shown.out
    assert "compiling tensor 2 x expert 1 for cpu:2" in shown.err


def test_json_has_the_promised_keys(compiled, capsys):
    assert run_command(["plan", LLAMA, "--topology", "cpu:2", "-tp", "2", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert set(report) >= KEYS
    sizes = {f"{part}_bytes" for part in ("weights", "kv_cache", "temp", "output", "total", "capacity")}
    assert set(report["per_device"]) >= sizes
    assert set(report["collectives"][0]) >= {"kind", "bytes", "seconds"}
    step = {"flops", "hbm_bytes", "wire_bytes", "seconds", "bound_by", "tokens_per_second"}
    assert set(report["prefill"]) >= step <= set(report["decode"])
    assert set(report["cost_per_million_tokens"]) == {"input", "output"}
    assert report["plan"] == {"tensor": 2, "expert": 1, "data": 1}


def test_a_search_compiles_the_best_and_lists_all(compiled, capsys):
    assert run_command(["plan", MIXTRAL, "--topology", "cpu:4", "--search", "--top", "2", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert len(compiled) == 2
    assert len(report["plans"]) == 6  # sizes of three axes with product 4
    assert [each["is_compiled"] for each in report["plans"]] == [True, True, False, False, False, False]
    assert report["plan"] in [each["plan"] for each in report["plans"][:2]]
    assert run_command(["plan", MIXTRAL, "--topology", "cpu:4", "--search", "--top", "1"]) == 0
    assert "estimated" in capsys.readouterr().out


def test_without_a_plan_the_best_by_the_estimate_is_compiled(compiled, capsys):
    assert run_command(["plan", MIXTRAL, "--topology", "cpu:4", "--json"]) == 0
    best = json.loads(capsys.readouterr().out)["plan"]
    assert compiled == [(best["tensor"], best["expert"], best["data"])]
    assert best["tensor"] * best["expert"] * best["data"] == 4


def test_a_plan_from_a_file_or_by_name(compiled, tmp_path):
    file = tmp_path / "p.toml"
    file.write_text("[mesh]\ntensor = 2\nexpert = 2\n")
    assert run_command(["plan", MIXTRAL, "--topology", "cpu:4", "--plan", str(file), "--json"]) == 0
    assert run_command(["plan", MIXTRAL, "--topology", "cpu:4", "--plan", "data", "--json"]) == 0
    assert compiled == [(2, 2, 1), (1, 1, 4)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--topology", "v9:4"], "--topology 'v9:4' is no topology; expected KIND:SHAPE"),
        (["--topology", "cpu:2", "-tp", "4"], "tensor 4 x expert 1 needs 4 devices and cpu:2 has 2"),
        (["--topology", "cpu:2", "-tp", "2", "-dp", "2"], "tensor 2 x expert 1 x data 2 needs 4 devices"),
        (["--topology", "cpu:2", "-ep", "2"], "the model has no experts to deal out to 2 devices"),
        (["--topology", "cpu:2", "--search", "-tp", "2"], "--search tries every plan"),
        (["--topology", "cpu:2", "--plan", "x.toml", "-tp", "2"], "--plan x.toml states the sizes of the mesh"),
        (["--topology", "cpu:2", "--plan", "x.toml"], "--plan x.toml:"),
        (["--topology", "cpu:2", "--context", "9000"], "--context 9,000 exceeds the 8,192 positions"),
        (["--topology", "cpu:2", "--weights", "fp8"], "--weights fp8: expected one of"),
        (["--topology", "cpu:2", "--kv-cache-dtype", "int3"], "--kv-cache-dtype must be one of auto, float32"),
        (["--topology", "cpu:2", "--page-size", "7"], "--page-size 7: page size 7 neither divides 128"),
    ],
)
def test_what_cannot_be_is_one_line(compiled, capsys, options, message):
    assert run_command(["plan", LLAMA, *options]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert compiled == []


def test_a_missing_compiler_is_one_line(monkeypatch, capsys):
    monkeypatch.setattr("sharding.topology._is_there", lambda module: False)
    assert run_command(["plan", LLAMA, "--topology", "h200:8", "-tp", "8"]) == 1
    assert "pip install 'jaxserve[plan-gpu]'" in capsys.readouterr().err


def test_a_picture_needs_matplotlib_and_a_png(compiled, tmp_path, capsys, monkeypatch):
    command = ["plan", LLAMA, "--topology", "cpu:2", "-tp", "2", "--plot"]
    monkeypatch.setattr(plot, "is_there", lambda: False)
    assert run_command([*command, str(tmp_path / "a.png")]) == 2
    assert "--plot needs matplotlib: pip install 'jaxserve[plot]'" in capsys.readouterr().err
    monkeypatch.setattr(plot, "is_there", lambda: True)
    assert run_command([*command, str(tmp_path / "a.pdf")]) == 2
    assert "expected a file name that ends in .png" in capsys.readouterr().err
    assert compiled == []


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="needs the extra `plot`")
def test_a_picture_is_written(compiled, tmp_path):
    file = tmp_path / "plans.png"
    assert run_command(["plan", MIXTRAL, "--topology", "cpu:4", "--search", "--plot", str(file)]) == 0
    assert file.read_bytes().startswith(b"\x89PNG")
