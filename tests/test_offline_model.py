"""`LLM` on a tiny model: memory comes back, a second start compiles nothing, and nothing compiles once ready."""

import gc
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import pytest

from jaxserve.config import EngineConfig
from jaxserve.engine.compile_watch import CompileWatch
from jaxserve.engine.executor import DeviceExecutor
from jaxserve.engine.progress import Silent
from jaxserve.frontend import Frontend
from jaxserve.offline import LLM, collect, start_frontend
from jaxserve.sampling_params import SamplingParams

TINY = str(Path(__file__).resolve().parent / "fixtures" / "models" / "llama_untied")
PROMPT = [5, 6, 7, 8]
GREEDY = SamplingParams(temperature=0.0, max_tokens=6)


def options() -> dict[str, Any]:
    cache = Path(os.environ["JAX_COMPILATION_CACHE_DIR"])
    limits = {"max_num_seqs": 2, "max_num_batched_tokens": 16, "max_model_len": 64}
    return {"compilation_cache_dir": cache, **limits}


def warm_frontend() -> Frontend:
    return start_frontend(EngineConfig(model=TINY, **options()), Silent(), warm_up=True, max_open=100)


@pytest.fixture(scope="module")
def warm() -> Iterator[Frontend]:
    with warm_frontend() as frontend:
        yield frontend


def generate(frontend: Frontend, params: SamplingParams, prompt: list[int] | None = None) -> list[list[int]]:
    result = collect(frontend.submit(prompt or PROMPT, params), None)
    assert all(output.finish_reason == "length" for output in result.outputs)
    return [output.token_ids for output in result.outputs]


def held_bytes() -> int:
    gc.collect()
    return sum(array.nbytes for array in jax.live_arrays())


def test_closing_gives_all_memory_back_and_a_second_llm_is_unharmed(warm):
    want = generate(warm, GREEDY)
    before = held_bytes()
    for _ in range(5):
        with LLM(TINY, **options()) as llm:
            assert held_bytes() > before + 400_000  # the weights alone
            assert [llm.generate([PROMPT], GREEDY)[0].outputs[0].token_ids] == want
        assert held_bytes() == before
    assert generate(warm, GREEDY) == want


def test_an_llm_that_is_dropped_gives_its_memory_back(warm):
    before = held_bytes()
    llm = LLM(TINY, **options())
    llm.generate([PROMPT], GREEDY)
    del llm
    assert held_bytes() == before


def test_a_failed_start_gives_its_memory_back():
    before = held_bytes()
    with pytest.raises(Exception, match="--max-model-len"):
        LLM(TINY, **{**options(), "max_model_len": 10_000})
    assert held_bytes() == before


def test_a_second_start_compiles_nothing(warm):
    with CompileWatch() as watch, warm_frontend() as second:
        assert generate(second, GREEDY) == generate(warm, GREEDY)
    assert watch.compiled == 0
    assert len(second.programs) == len(warm.programs) > 1
    assert all(program.from_cache for program in second.programs if program.name != "place request")  # jit's own


def test_nothing_compiles_once_ready_whatever_is_asked_for(warm):
    cases: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"n": 2, "temperature": 0.7, "top_k": 5, "top_p": 0.9, "min_p": 0.01},
        {"logprobs": 3},
        {"prompt_logprobs": 3},
        {"logit_bias": {7: 5.0}, "min_tokens": 2, "stop_token_ids": [300 % 256]},
        {"repetition_penalty": 1.2, "presence_penalty": 0.1, "frequency_penalty": 0.1},
    ]
    for changes in cases:
        for prompt in ([3], PROMPT, list(range(3, 50))):
            collect(warm.submit(prompt, SamplingParams(max_tokens=5, **changes)), None)
    assert warm.stats().compiles_after_ready_total == 0


def test_a_compilation_after_ready_is_counted_and_said(caplog):
    with warm_frontend() as frontend:
        generate(frontend, GREEDY)
        assert frontend.stats().compiles_after_ready_total == 0
        device: Any = frontend.engine.executor
        device._steps.clear()  # as if a shape had been forgotten
        device._program_cache = None
        generate(frontend, GREEDY)
        assert frontend.stats().compiles_after_ready_total > 0
    said = [record.message for record in caplog.records if record.name == "jaxserve"]
    assert said
    assert all(line.startswith("compiling decode") and "a defect" in line for line in said)


@pytest.mark.parametrize(("num_prompt_tokens", "num_choices"), [(1, 1), (20, 1), (20, 100), (1, 100), (60, 3)])
def test_whatever_the_size_of_a_request_its_shapes_are_found(warm, num_prompt_tokens, num_choices):
    """More choices than slots, more prompts than rows, prompts of several chunks: all are among the compiled ones."""
    num_programs = len(warm.programs)
    warm.prepare(num_prompt_tokens, num_choices, Silent())
    assert len(warm.programs) == num_programs


def test_an_llm_compiles_on_first_use_and_does_not_count_it():
    with LLM(TINY, **options()) as llm:
        device: Any = llm.frontend.engine.executor
        assert llm.frontend.programs == []
        llm.generate([PROMPT], GREEDY)
        assert {program.name for program in llm.frontend.programs} < {str(shape) for shape in device.shapes}
        assert llm.get_metrics().compiles_after_ready_total == 0


def test_weights_that_are_no_numbers_end_requests_and_not_the_engine(warm):
    want = generate(warm, GREEDY)
    params: Any = cast(DeviceExecutor, warm.engine.executor).params
    sound = params["norm"]
    params["norm"] = jnp.full_like(sound, jnp.nan)
    result = collect(warm.submit(PROMPT, GREEDY), None)
    assert (result.outputs[0].finish_reason, result.outputs[0].token_ids) == ("error", [])
    params["norm"] = sound
    assert generate(warm, GREEDY) == want
    assert warm.stats().requests_finished_total["error"] == 1


def test_the_effective_configuration_is_plain_data(warm):
    found = warm.effective_config()
    assert found["max_model_len"] == {"value": 64, "reason": "--max-model-len"}
    assert all(set(choice) == {"value", "reason"} for choice in found.values())


def test_a_seed_repeats_and_choices_differ(warm):
    params = SamplingParams(n=2, seed=11, max_tokens=12, ignore_eos=True)
    first, second = generate(warm, params), generate(warm, params)
    assert first == second
    assert first[0] != first[1]
    assert generate(warm, SamplingParams(seed=11, max_tokens=12))[0] == first[0]


def test_min_tokens_and_stop_tokens_on_the_device(warm):
    """A biased token would be drawn at once; min_tokens masks it until enough were generated."""
    params = SamplingParams(
        temperature=0.0, max_tokens=10, min_tokens=4, logit_bias={9: 100.0}, stop_token_ids=[9], logprobs=0
    )
    output = collect(warm.submit(PROMPT, params), None).outputs[0]
    assert output.token_ids.index(9) == len(output.token_ids) - 1 >= 3
    assert (output.finish_reason, output.stop_reason) == ("stop", 9)


def test_logprobs_agree_with_scoring_the_text(warm):
    params = SamplingParams(temperature=0.0, max_tokens=6, logprobs=2)
    output: Any = collect(warm.submit(PROMPT, params), None).outputs[0]
    whole = PROMPT + output.token_ids
    scoring = SamplingParams(max_tokens=1, prompt_logprobs=2)
    scored: Any = collect(warm.submit(whole, scoring), None).prompt_logprobs
    for place, token in enumerate(output.token_ids):
        written, read = output.logprobs[place], scored[len(PROMPT) + place]
        assert list(written) == list(read)
        assert written[token].logprob == pytest.approx(read[token].logprob, abs=1e-4)  # float32, other step shapes


def test_generation_config_gives_defaults_and_ends(tmp_path):
    """The third greedy token ends it: its id stands in the file, which the model has beside its weights."""
    with LLM(TINY, **options()) as llm:
        greedy = llm.generate([PROMPT], GREEDY)[0].outputs[0].token_ids
    shutil.copytree(TINY, tmp_path / "model")
    content = {"do_sample": False, "max_new_tokens": 5, "eos_token_id": [greedy[2]]}
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps(content))
    want = {"auto": greedy[: greedy.index(greedy[2]) + 1], "none": greedy}
    for chosen, ids in want.items():
        with LLM(str(tmp_path / "model"), **options(), generation_config=chosen) as llm:
            params = llm.get_default_sampling_params()
            assert params == (SamplingParams(temperature=0.0, max_tokens=5) if chosen == "auto" else SamplingParams())
            given = None if chosen == "auto" else GREEDY
            assert llm.generate([PROMPT], given)[0].outputs[0].token_ids == ids
            found = llm.effective_config()
            assert found["sampling_defaults"]["value"] == (
                {"temperature": 0.0, "max_tokens": 5} if chosen == "auto" else {}
            )
            assert found["eos_token_ids"]["value"] == ([greedy[2]] if chosen == "auto" else [])
