"""Any plan gives the logits and the tokens of one device, on eight virtual devices of a process of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from jaxserve.config import EngineConfig
from jaxserve.errors import ConfigError

SCRIPT = Path(__file__).resolve().parents[1] / "models" / "spread_run.py"

# Plans as TENSORxEXPERT[xDATA]; ":e" runs the whole engine as well. Heads 4 and kv heads 2 do not divide by 3, 8 or 6.
QUICK = {
    "llama_tied_bias_llama3": ["3x1"],
    "mixtral": ["2x2:e", "4x1", "1x8"],
    "gpt_oss": ["2x3"],
    "deepseek_v3": ["2x4:e", "8x1", "2x2x2:e"],
    "gemma3_text": ["1x1x2:e"],
}
FULL = {
    "llama_untied": ["2x1", "3x1", "4x1:e", "6x1", "8x1"],
    "mistral_swa": ["2x1", "8x1:e"],
    "gemma2": ["2x1", "8x1"],
    "gemma3_text": ["2x1", "3x1:e", "8x1"],
    "qwen2_bias": ["2x1", "8x1"],
    "qwen3_qknorm": ["4x1", "3x1"],
    "mixtral": ["1x2", "1x3", "2x1", "2x3", "4x2:e", "8x1"],
    "qwen2_moe": ["1x2", "1x8", "2x4:e", "4x2"],
    "qwen3_moe": ["1x2:e", "1x4", "1x8", "2x2", "2x4", "4x2", "8x1"],
    "olmoe": ["1x8", "2x4", "4x2:e"],
    "granitemoe": ["1x6", "2x3", "4x2:e"],
    "glm4_moe": ["1x8", "2x4:e", "8x1"],
    "gpt_oss": ["1x2", "1x6", "2x2", "4x2:e", "8x1"],
    "deepseek_v2_lite": ["1x2", "1x8", "2x4:e", "4x2"],
    "deepseek_v3": ["1x2", "1x4", "1x8", "2x2", "4x2:e", "2x1"],
    # Groups with requests of their own, in every mix of two, four and eight devices.
    "groups mixtral": ["1x1x2:e", "2x1x2:e", "1x2x2:e", "1x1x4:e", "2x2x2:e", "4x1x2:e", "1x4x2:e", "1x1x8:e"],
    "groups qwen3_moe": ["1x1x2:e", "2x1x2:e", "1x2x2:e", "1x1x4:e", "2x2x2:e", "2x1x4:e", "1x2x4:e", "1x1x8:e"],
    "groups deepseek_v3": ["1x1x2:e", "2x1x2:e", "1x2x2:e", "1x1x4:e", "2x1x4:e", "1x2x4:e", "4x1x2:e", "1x1x8:e"],
    "groups gpt_oss": ["1x1x2:e", "2x1x2:e", "1x2x2:e", "1x1x4:e", "2x2x2:e", "2x1x4:e", "1x4x2:e", "1x1x8:e"],
    "groups llama_untied": ["1x1x2:e", "2x1x2:e", "4x1x2:e", "2x1x4:e", "1x1x8:e"],
}


def run_plans(name: str, plans: list[str]) -> None:
    command = [sys.executable, str(SCRIPT), name, *plans]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=os.environ)
    assert done.returncode == 0, done.stderr[-3000:]
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [run["plan"] for run in found] == [plan.partition(":")[0] for plan in plans]
    for run in found:
        assert run["difference"] < 1e-4, run
        assert run.get("greedy", True), run


@pytest.mark.parametrize("name", QUICK)
def test_plans_give_the_logits_of_one_device(name):
    run_plans(name, QUICK[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", FULL)
def test_every_mix_of_tensor_and_expert(name):
    run_plans(name.removeprefix("groups "), FULL[name])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tensor_parallel_size": 0}, "--tensor-parallel-size must be an integer of at least 1, got 0"),
        ({"plan": "p.toml", "expert_parallel_size": 2}, "states the sizes of the mesh: leave the parallel sizes out"),
    ],
)
def test_sizes_that_cannot_be_are_refused_in_one_line(options, message):
    with pytest.raises(ConfigError, match=message):
        EngineConfig(model="m", **options)
