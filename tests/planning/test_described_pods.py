"""Well-known models on devices that are not there, by the real compilers; only where those are installed."""

import importlib.util
import os
from pathlib import Path

import pytest
from fixture_files import FIXTURES

from jaxserve.planning.described_model import describe_model
from jaxserve.planning.plans import compile_plan
from jaxserve.planning.report import PROGRAMS, plan_report, planned
from jaxserve.planning.request import PlanRequest
from sharding.topology import CompilerMissing, check_compiler, read_topology

CONFIGS = FIXTURES / "configs"
GIB = 2**30
LIMIT_SECONDS = 280.0  # of a machine that does other things meanwhile; the command's own limit is 120


def compiled_report(name: str, topology: str, tensor: int, expert: int, **options) -> dict:
    try:
        check_compiler(read_topology(topology))
    except CompilerMissing as missing:
        pytest.skip(str(missing))
    defaults: dict = {"context": 4096, "batch": 32}
    request = PlanRequest(
        model=str(CONFIGS / name), topology=topology, tensor=tensor, expert=expert, **(defaults | options)
    )
    facts = compile_plan(request, os.environ, LIMIT_SECONDS)
    assert "failure" not in facts, facts
    return plan_report(planned(request, describe_model(Path(request.model), None)), facts, None)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "topology", "tensor", "expert"),
    [
        ("deepseek_v3", "v5p:4x4x8", 4, 32),
        ("deepseek_v3", "v6e:16x16", 32, 8),
        ("deepseek_v3", "h200:2x8", 8, 2),
        ("llama_3_70b", "h200:8", 8, 1),
        ("llama_3_70b", "v5e:4x4", 16, 1),
        ("mixtral_8x7b", "h200:1", 1, 1),
        ("mixtral_8x7b", "b200:1", 1, 1),
    ],
)
@pytest.mark.timeout(300)
def test_pods(name, topology, tensor, expert):
    report = compiled_report(name, topology, tensor, expert)
    assert report["is_compiled"]
    assert report["fits"]
    assert report["host_memory_bytes"] < 4 * GIB
    for program in PROGRAMS:
        step = report[program]
        assert step["argument_bytes"] == pytest.approx(step["predicted_argument_bytes"], rel=0.02)
    stacks = [each for each in report["warnings"] if each["kind"] in ("gathered_weight", "not_aliased")]
    assert stacks == []


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs the extra `plan-tpu`")
def test_what_the_compiler_refuses_is_said_in_its_words():
    report = compiled_report("llama_3_70b", "v5e:4x4", 8, 1)
    assert not report["fits"]
    assert "exceeds available HBM (15.75G)" in report["refusal"]
    assert "16 devices, -tp 16 -ep 1" in report["advice"]
