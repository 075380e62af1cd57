"""Load of experts is counted, and moving them between devices while requests run changes no token."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from jaxserve.errors import InvalidRequest
from jaxserve.offline import LLM

TESTS = Path(__file__).resolve().parents[1]
SCRIPT = TESTS / "models" / "rebalance_run.py"
CHOSEN = {"mixtral": 2, "deepseek_v3": 4}

PLANS = {
    "mixtral": "[mesh]\nexpert = 2\n[experts]\nredundant = 2\n",
    "deepseek_v3": "[mesh]\ntensor = 2\nexpert = 2\ndata = 2\n[experts]\nredundant = 4\n",
}


@pytest.mark.parametrize("name", PLANS)
def test_a_move_in_the_middle_of_an_answer_changes_nothing(name, tmp_path):
    plan = tmp_path / "plan.toml"
    plan.write_text(PLANS[name])
    done = subprocess.run(
        [sys.executable, str(SCRIPT), name, str(plan)], capture_output=True, text=True, timeout=600, env=os.environ
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert (found["before"], found["in_the_middle"], found["after"]) == (True, True, True)
    tokens = np.array(found["tokens"])
    assert (tokens.sum(axis=1) == found["num_tokens"] * CHOSEN[name]).all()
    assert len(tokens) == len(found["layers"])
    assert np.allclose(np.array(found["device_tokens"]).sum(axis=1), tokens.sum(axis=1))
    assert found["moved"] > 0
    assert found["imbalance"][1] < found["imbalance"][0]


def test_one_device_counts_too_and_a_dense_model_has_no_experts():
    options = {"max_num_seqs": 2, "max_num_batched_tokens": 32, "num_pages": 16, "kernels": "xla"}
    with LLM(str(TESTS / "fixtures" / "models" / "mixtral"), **options) as llm:
        assert llm.expert_load().tokens.sum() == 0
        llm.generate([{"prompt_token_ids": [1, 2, 3]}], use_tqdm=False)
        report = llm.expert_load()
        assert (report.tokens.sum(axis=1) == 2 * (3 + 15)).all()
        assert report.imbalance.tolist() == [1.0] * len(report.layers)
    dense = str(TESTS / "fixtures" / "models" / "llama_untied")
    with LLM(dense, **options) as llm, pytest.raises(InvalidRequest, match="no experts"):
        llm.expert_load()
