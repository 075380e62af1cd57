"""What a plan predicts is what running it shows; its report; and each warning has a program that earns it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from fixture_files import FIXTURES

from jaxserve.planning.described_model import describe_model
from jaxserve.planning.plans import compile_plan
from jaxserve.planning.report import PROGRAMS, plan_report, planned
from jaxserve.planning.request import PlanRequest

SCRIPT = Path(__file__).with_name("planned_and_run.py")
SMALL: dict = {"topology": "cpu:4", "context": 64, "batch": 4, "num_tokens": 64}


def request_for(model: str, tensor: int, expert: int, data: int = 1) -> PlanRequest:
    return PlanRequest(model=str(FIXTURES / "models" / model), tensor=tensor, expert=expert, data=data, **SMALL)


@pytest.fixture(scope="module")
def mixtral() -> tuple[PlanRequest, dict]:
    request = request_for("mixtral", 2, 2)
    return request, compile_plan(request, os.environ)


def run(*arguments: str) -> dict:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, timeout=280, env=os.environ
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def check(request: PlanRequest, facts: dict, *names: str) -> None:
    shown = run("run", request.model, f"{request.tensor}x{request.expert}x{request.data}", *names)
    assert facts["weights_bytes"] == shown["weights_bytes"]
    assert facts["kv_cache_bytes"] == shown["kv_cache_bytes"]
    for name in names:
        assert facts[name]["argument_bytes"] == facts[name]["input_bytes"] == shown[name]["argument_bytes"]
        assert facts[name]["temp_bytes"] == shown[name]["temp_bytes"] > 0
        assert shown[name]["held_bytes"] >= shown[name]["argument_bytes"]  # modules that no step reads are held too


def test_predicted_bytes_are_those_of_a_run(mixtral):
    check(*mixtral, "decode")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "sizes"),
    [
        ("llama_untied", (4, 1, 1)),
        ("llama_untied", (1, 1, 1)),
        ("deepseek_v3", (2, 2, 1)),
        ("deepseek_v3", (1, 2, 2)),
        ("gemma3_text", (3, 1, 1)),
        ("mixtral", (2, 1, 2)),
    ],
)
def test_predicted_bytes_of_other_models_and_plans(model, sizes):
    request = request_for(model, *sizes)
    check(request, compile_plan(request, os.environ), *PROGRAMS)


def test_the_report_adds_up(mixtral):
    request, facts = mixtral
    report = plan_report(planned(request, describe_model(Path(request.model), None)), facts, 2.0)
    memory = report["per_device"]
    parts = ("weights", "kv_cache", "state", "inputs", "padding", "temp", "output")
    assert memory["total_bytes"] == sum(memory[f"{part}_bytes"] for part in parts)
    assert memory["temp_bytes"] == max(facts[name]["temp_bytes"] for name in PROGRAMS)
    for name in PROGRAMS:
        sizes = facts[name]
        shown = sizes["argument_bytes"] + sizes["temp_bytes"] + sizes["output_bytes"] - sizes["alias_bytes"]
        assert memory["total_bytes"] >= shown
        assert report[name]["tokens_per_second"] > 0
        assert report[name]["bound_by"] in ("compute", "memory", "wire")
        sent = [each for each in report["collectives"] if each["program"] == name]
        assert sum(each["wire_bytes"] for each in sent) == pytest.approx(report[name]["wire_bytes"])
    assert report["is_compiled"]
    assert report["fits"]
    assert report["compile_seconds"] > 0
    assert report["cost_per_million_tokens"]["output"] > report["cost_per_million_tokens"]["input"] > 0
    sums = {(each["kind"], each["num_devices"]) for each in report["collectives"]}
    assert sums == {("all-reduce", 2), ("all-reduce", 4), ("all-gather", 2)}
    json.dumps(report)


def test_an_estimate_is_near_what_is_compiled(mixtral):
    """Counted by hand: the same collectives, and operations without those of norms, which are a quarter of a model so
    small (they sum by products with a few columns of ones)."""
    request, facts = mixtral
    plan = planned(request, describe_model(Path(request.model), None))
    guessed, compiled = plan_report(plan, {}, None), plan_report(plan, facts, None)
    assert not guessed["is_compiled"]
    for name in PROGRAMS:
        assert guessed[name]["wire_bytes"] == pytest.approx(compiled[name]["wire_bytes"], rel=0.2)
        assert guessed[name]["flops"] == pytest.approx(compiled[name]["flops"], rel=0.3)


def test_every_warning_has_a_program_that_earns_it():
    found = run("planted")
    assert [each["kind"] for each in found["gathered"]] == ["gathered_weight"]
    assert "layers.mlp.up has this shape" in found["gathered"][0]["message"]
    assert [each["kind"] for each in found["not_donated"]] == ["not_aliased"]
    assert "of 4,096 donated bytes of cache and state 0 are updated in place" in found["not_donated"][0]["message"]
    assert [each["kind"] for each in found["large_temp"]] == ["temp"]
    assert "more than the cache (8,192 bytes)" in found["large_temp"][0]["message"]
    assert found["not_gathered"] == found["donated"] == found["small_temp"] == []
