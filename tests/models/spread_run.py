"""Run by test_spread.py in a process with eight virtual devices: one reference model under several plans.

`python spread_run.py MODEL TENSORxEXPERT[xDATA]...` prints a line of JSON for each plan: the largest difference of any
logit from the golden run, and whether the greedy tokens are its tokens.
"""

import json
import os
import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ["JAX_PLATFORMS"] = "cpu"
sys.path[:0] = [str(TESTS.parent), str(TESTS), str(TESTS / "models")]

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from fixture_files import FIXTURES, LOGIT_STEP  # noqa: E402
from parity import PAGE, golden, layout_of_one  # noqa: E402

from jaxserve.engine.loading import Recipe, load_model, model_config  # noqa: E402
from jaxserve.engine.progress import Silent  # noqa: E402
from jaxserve.engine.spread import spread_over  # noqa: E402
from jaxserve.engine.step import Program, logits_of_tokens  # noqa: E402
from jaxserve.kv_cache import cache_spec  # noqa: E402
from jaxserve.offline import LLM  # noqa: E402
from jaxserve.sampling_params import SamplingParams  # noqa: E402
from pallas_kernels.kernels import XLA  # noqa: E402
from sharding.plan import ShardingPlan  # noqa: E402


def difference(folder: Path, plan: ShardingPlan, want: dict[str, np.ndarray]) -> float:
    prompt = int(want["all_logits_prompt"])
    length = int(want["lengths"][prompt])
    over = spread_over(plan, model_config(folder), jax.devices())
    loaded = load_model(folder, Recipe(layout="expanded", dtype="float32"), Silent(), over.placement)
    over = over.with_params(loaded.params)
    program = Program(model=loaded.model, config=over.config, kernels=XLA, dtype="float32", spread=over)
    pages = -(-length // PAGE)
    cache = program.new_cache(cache_spec(over.config, PAGE, "float32"), pages)
    ids = jnp.asarray(want["input_ids"][prompt, :length], jnp.int32)
    logits, _ = jax.jit(lambda *arguments: logits_of_tokens(program, *arguments))(
        loaded.params, cache, ids, layout_of_one(0, length, pages)
    )
    return float(np.abs(np.asarray(logits) - want["all_logits"][:length]).max()) - LOGIT_STEP / 2


def engine(folder: Path, plan: ShardingPlan) -> LLM:
    cache = Path(os.environ["JAX_COMPILATION_CACHE_DIR"])
    return LLM(
        str(folder), tensor_parallel_size=plan.tensor, expert_parallel_size=plan.expert, data_parallel_size=plan.data,
        compilation_cache_dir=cache, max_num_seqs=4, max_num_batched_tokens=64, num_pages=64, page_size=16,
    )  # fmt: skip


def draws_the_same(folder: Path, plan: ShardingPlan, want: dict[str, np.ndarray]) -> bool:
    prompts = [want["input_ids"][n, :length].tolist() for n, length in enumerate(want["lengths"])]
    with engine(folder, plan) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
        results = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)
    return all(r.outputs[0].token_ids == ids.tolist() for r, ids in zip(results, want["greedy_ids"], strict=True))


def difference_in_groups(folder: Path, plan: ShardingPlan, want: dict[str, np.ndarray]) -> float:
    """Of the log probabilities of a prompt's tokens, asked of every group at once."""
    prompt = int(want["all_logits_prompt"])
    ids = want["input_ids"][prompt, : want["lengths"][prompt]].tolist()
    expected = np.asarray(jax.nn.log_softmax(want["all_logits"][: len(ids) - 1], axis=-1))
    with engine(folder, plan) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1)
        results = llm.generate([{"prompt_token_ids": ids}] * (2 * plan.data), params)
    scored = [r.prompt_logprobs or [] for r in results]
    found = [[at[token].logprob for at, token in zip(one[1:], ids[1:], strict=True) if at] for one in scored]
    return float(np.abs(np.array(found) - expected[np.arange(len(ids) - 1), ids[1:]]).max()) - LOGIT_STEP


if __name__ == "__main__":
    folder = FIXTURES / "models" / sys.argv[1]
    want = golden(folder)
    for text in sys.argv[2:]:
        sizes, _, whole_engine = text.partition(":")
        tensor, expert, data = map(int, f"{sizes}x1".split("x")[:3])
        plan = ShardingPlan(tensor=tensor, expert=expert, data=data)
        measure = difference if data == 1 else difference_in_groups
        found = {"plan": sizes, "difference": measure(folder, plan, want)}
        if whole_engine:
            found["greedy"] = draws_the_same(folder, plan, want)
        print(json.dumps(found), flush=True)
