"""Run by test_experts.py in a process with eight virtual devices: a mixture whose experts are moved while it runs.

`python rebalance_run.py MODEL PLAN.toml` prints JSON: tokens that were computed, the report of load before, the moves,
and whether answers before, in the middle of and after a move are the golden run's.
"""

import json
import os
import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ["JAX_PLATFORMS"] = "cpu"
sys.path[:0] = [str(TESTS.parent), str(TESTS), str(TESTS / "models")]

from fixture_files import FIXTURES  # noqa: E402
from parity import golden  # noqa: E402

from jaxserve.offline import LLM  # noqa: E402
from jaxserve.sampling_params import SamplingParams  # noqa: E402

NEW_TOKENS = 24


def main(model: str, plan: str) -> None:
    folder = FIXTURES / "models" / model
    want = golden(folder)
    prompts = [want["input_ids"][n, :length].tolist() for n, length in enumerate(want["lengths"])]
    greedy = [ids.tolist() for ids in want["greedy_ids"]]
    params = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
    cache = Path(os.environ["JAX_COMPILATION_CACHE_DIR"])
    found = {}
    with LLM(
        str(folder), plan=plan, compilation_cache_dir=cache, enable_prefix_caching=False,
        max_num_seqs=4, max_num_batched_tokens=64, num_pages=64, page_size=16,
    ) as llm:  # fmt: skip

        def is_golden() -> bool:
            results = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
            return [result.outputs[0].token_ids for result in results] == greedy

        found["before"] = is_golden()
        report = llm.expert_load()
        found["num_tokens"] = sum(len(prompt) + NEW_TOKENS - 1 for prompt in prompts)
        found["layers"] = list(report.layers)
        found["tokens"] = report.tokens.tolist()
        found["device_tokens"] = report.device_tokens.tolist()
        generation = llm.frontend.submit(prompts[0], params)
        token_ids: list[int] = []
        for delta in generation:
            token_ids += delta.token_ids
            if len(token_ids) == 6:
                done = llm.rebalance_experts()
        found["in_the_middle"] = token_ids == greedy[0]
        found["moved"] = done.moved
        found["imbalance"] = [done.imbalance_before.max(), done.imbalance_after.max()]
        found["after"] = is_golden()
        found["moved_again"] = llm.rebalance_experts().moved
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
