"""Run by test_hosts.py as host 0 of two: prints the tokens of a golden run, then waits for a line on stdin."""

import json
import os
import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
os.environ["JAX_PLATFORMS"] = "cpu"
sys.path[:0] = [str(TESTS.parent), str(TESTS), str(TESTS / "models")]

from fixture_files import FIXTURES  # noqa: E402
from parity import golden  # noqa: E402

from jaxserve.offline import LLM  # noqa: E402
from jaxserve.sampling_params import SamplingParams  # noqa: E402

if __name__ == "__main__":
    folder = FIXTURES / "models" / sys.argv[1]
    options = json.loads(sys.argv[2])
    want = golden(folder)
    prompts = [want["input_ids"][n, :length].tolist() for n, length in enumerate(want["lengths"])]
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    with LLM(str(folder), compilation_cache_dir=Path(os.environ["JAX_COMPILATION_CACHE_DIR"]), **options) as llm:
        results = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
        found = [result.outputs[0].token_ids for result in results]
        print(json.dumps({"same": found == want["greedy_ids"].tolist()}), flush=True)
        sys.stdin.readline()
