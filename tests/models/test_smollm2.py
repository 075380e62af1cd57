"""SmolLM2-135M-Instruct Q4_1 against an independent float32 run of the same GGUF."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from jaxserve.offline import LLM
from jaxserve.sampling_params import SamplingParams

CASES = json.loads((Path(__file__).resolve().parent.parent / "fixtures" / "smollm2" / "cases.json").read_text())[
    "cases"
]
MAX_ERROR = 5e-3
MIN_MARGIN = 0.01

# In the last case the reference continues with its second choice at three steps: its stated margins there are those of
# the other token. A float64 run that shares nothing with ours (below) says so too.
SECOND_CHOICES = {(8, 10), (8, 24), (8, 36)}


@pytest.fixture(scope="module")
def llm(smollm2_path: Path) -> Iterator[LLM]:
    cache = Path(os.environ["JAX_COMPILATION_CACHE_DIR"])
    with LLM(
        str(smollm2_path),
        max_model_len=512,
        max_num_seqs=4,
        max_num_batched_tokens=384,
        kernels="reference",
        compilation_cache_dir=cache,
    ) as llm:
        yield llm


@pytest.mark.parametrize("number", range(len(CASES)))
def test_logprobs_margins_and_greedy_ids(llm: LLM, number: int):
    """One scoring run over prompt and continuation: prompt logprobs, argmax and margin at every position."""
    case = CASES[number]
    ids = case["prompt_ids"] + case["greedy_ids"]
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=20)
    found = llm.generate({"prompt_token_ids": ids}, params)[0].prompt_logprobs
    assert found is not None
    assert found[0] is None
    num_prompt = len(case["prompt_ids"])
    for position in range(1, len(ids)):
        entry = found[position]
        assert entry is not None
        by_rank = sorted(entry.items(), key=lambda item: -item[1].logprob)
        (best, first), (_, second) = by_rank[:2]
        step = position - num_prompt
        if step >= 0:
            margin, want = case["greedy_margin"][step], case["greedy_ids"][step]
        else:
            margin, want = case["top2_margin"][position - 1], case["argmax"][position - 1]
            assert entry[ids[position]].logprob == pytest.approx(case["prompt_logprobs"][position], abs=MAX_ERROR)
        assert first.logprob - second.logprob == pytest.approx(margin, abs=MAX_ERROR)
        if margin > MIN_MARGIN:
            assert (best == want) == ((number, step) not in SECOND_CHOICES)


@pytest.mark.parametrize("number", range(len(CASES)))
def test_the_64_largest_logits(smollm2_logits, number: int):
    case = CASES[number]
    got = smollm2_logits(case["prompt_ids"])[-1]
    want_ids, want = case["last_top64_ids"], case["last_top64_logits"]
    assert np.abs(got[want_ids] - want).max() < MAX_ERROR


@pytest.fixture(scope="module")
def smollm2_logits(smollm2_path: Path):
    from parity import whole_prompt_logits

    from pallas_kernels.kernels import REFERENCE

    def logits(ids: list[int]) -> np.ndarray:
        """Padded to two lengths so that two programs serve all cases; causal attention ignores what follows."""
        length = 64 if len(ids) <= 64 else 320
        padded = np.asarray(ids + [0] * (length - len(ids)))
        return whole_prompt_logits(smollm2_path, padded, kernels=REFERENCE)[: len(ids)]

    return logits


def test_greedy_generation(llm: LLM):
    """All cases at once through the engine; the last up to its first second choice."""
    params = SamplingParams(temperature=0.0, max_tokens=48, ignore_eos=True, skip_special_tokens=False)
    results = llm.generate([{"prompt_token_ids": case["prompt_ids"]} for case in CASES], params)
    for number, (case, result) in enumerate(zip(CASES, results, strict=True)):
        small = [i for i, m in enumerate(case["greedy_margin"]) if m <= MIN_MARGIN or (number, i) in SECOND_CHOICES]
        end = min(small, default=48)
        assert end >= 10
        assert result.outputs[0].token_ids[:end] == case["greedy_ids"][:end]
        if end == 48:
            assert result.outputs[0].text == case["greedy_text"]


@pytest.mark.slow
def test_the_second_choices_are_the_references_fault(smollm2_path: Path):
    """Float64 numpy on weights that the `gguf` package dequantized: its argmax is not the reference's id there."""
    import numpy_llama

    weights, sizes = numpy_llama.from_gguf(str(smollm2_path))
    case = CASES[8]
    num_prompt = len(case["prompt_ids"])
    logits = numpy_llama.logits(weights, case["prompt_ids"] + case["greedy_ids"], sizes)
    wrong = {
        (8, step)
        for step, token in enumerate(case["greedy_ids"])
        if int(logits[num_prompt - 1 + step].argmax()) != token
    }
    assert wrong == SECOND_CHOICES
