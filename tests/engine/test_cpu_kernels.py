"""`--kernels cpu`: packed weights read by compiled kernels, from the file to the tokens."""

import os
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from engines import add, alone, engine_over, finish, random_prompt
from fixture_files import golden_logits

from jaxserve.config import EngineConfig
from jaxserve.engine.build import build_engine
from jaxserve.engine.loading import Recipe, cpu_kernel_needs, load_model, tiled_formats
from jaxserve.engine.progress import Silent
from jaxserve.errors import ConfigError
from jaxserve.offline import LLM
from jaxserve.quant.tiled import TiledWeight
from jaxserve.sampling_params import SamplingParams
from pallas_kernels.cpu.targets import KernelBuildError

LEGACY = Path(__file__).resolve().parent.parent / "fixtures" / "gguf" / "gguf_llama_legacy" / "model.gguf"


def config(path: Path, **options: Any) -> EngineConfig:
    cache = Path(os.environ["JAX_COMPILATION_CACHE_DIR"])
    sizes: dict[str, Any] = {"max_model_len": 128, "max_num_seqs": 4, "max_num_batched_tokens": 64}
    return EngineConfig(model=str(path), kernels="cpu", compilation_cache_dir=cache, **(sizes | options))


@pytest.fixture(scope="module")
def legacy():
    """A tiny model with a matrix of every format the kernels have, and of some they have not."""
    built = build_engine(config(LEGACY), LEGACY, frozenset(), Silent(), warm_up=False)
    yield built
    built.engine.close()


def test_tiles_hold_the_files_values_exactly():
    packed = load_model(LEGACY, Recipe(layout="packed", dtype="float32"), Silent())
    tiled = load_model(LEGACY, Recipe(layout="tiled", dtype="float32"), Silent())
    assert tiled_formats(tiled) == cpu_kernel_needs(LEGACY)[0].single
    for ours, theirs in zip(tiled.params["layers"], packed.params["layers"], strict=True):
        for block in ("attention", "mlp"):
            for names, weight in ours[block].items():
                parts = [np.asarray(theirs[block][name].decode()) for name in names.split("+")]
                assert (np.asarray(weight.decode()) == np.concatenate(parts)).all()
    assert tiled.held_bytes < 2 * packed.held_bytes


def test_logits_differ_by_the_rounding_of_activations_only(legacy):
    """Eight bits an activation: a half percent of its block's peak; logits of this model have a deviation near 1.5."""
    golden = np.load(LEGACY.parent / "golden.npz")
    prompt = int(golden["all_logits_prompt"])
    ids = golden["input_ids"][prompt, : int(golden["lengths"][prompt])].tolist()
    want = golden_logits(golden["all_logits"])[: len(ids)]
    want = want - np.log(np.exp(want).sum(-1, keepdims=True))
    engine = engine_over(legacy)
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    request = engine.request("r", ids, params, max_tokens=1, eos_token_ids=frozenset())
    engine.add(request)
    finish(engine)
    found = request.payload.prompt_logprobs  # type: ignore[attr-defined]
    errors = [abs(found[i].logprob - want[i - 1, ids[i]]) for i in range(1, len(ids))]
    assert 0 < np.mean(errors) < 0.03
    assert max(errors) < 0.15


def test_batched_equals_alone_without_deterministic_mode(legacy):
    """The kernel sums a row in one order whatever stands beside it."""
    params = SamplingParams(temperature=0.8, seed=5, max_tokens=10, ignore_eos=True)
    prompts = [random_prompt(7 + 5 * i, 272, i) for i in range(6)]
    wants = [alone(legacy, prompt, params).token_ids for prompt in prompts]
    engine = engine_over(legacy)
    for i, prompt in enumerate(prompts):
        add(engine, str(i), prompt, params)
    outcomes = finish(engine)
    assert [outcomes[str(i)].token_ids for i in range(6)] == wants


def test_the_choice_says_what_it_costs(legacy):
    kernels = legacy.choices["kernels"]
    assert kernels.value == "cpu"
    assert "rounded to 8 bits" in kernels.reason
    assert legacy.choices["weight_layout"].value == "tiled"
    assert "bytes in tiles for the CPU kernels, the others packed or in float32" in legacy.choices["weights"].reason


def test_kernels_that_cannot_be_built_are_one_line(monkeypatch):
    def fail(*arguments: object, **options: object) -> None:
        raise KernelBuildError("no compiler today")

    monkeypatch.setattr("jaxserve.engine.cpu_choice.register", fail)
    with pytest.raises(ConfigError, match=r"^--kernels cpu: no compiler today; choose xla$"):
        build_engine(config(LEGACY), LEGACY, frozenset(), Silent(), warm_up=False)


def test_a_second_engine_builds_no_kernel(legacy, monkeypatch):
    monkeypatch.setattr("subprocess.Popen", None)
    built = build_engine(config(LEGACY), LEGACY, frozenset(), Silent(), warm_up=False)
    built.engine.close()


@pytest.mark.parametrize("option", [{"dtype": "bfloat16"}, {"expand_weights": "always"}])
def test_what_the_kernels_cannot_do_is_refused(option):
    with pytest.raises(ConfigError, match="--kernels cpu"):
        build_engine(config(LEGACY, **option), LEGACY, frozenset(), Silent(), warm_up=False)


def test_the_real_model_answers_as_with_float_kernels(smollm2_path: Path):
    """The first words agree; the weights stay near the file's size (the tied table is held twice)."""
    options: dict[str, Any] = {"max_model_len": 128, "max_num_seqs": 2, "max_num_batched_tokens": 64}
    with LLM(str(smollm2_path), kernels="cpu", **options) as llm:
        result = llm.generate("The capital of France is", SamplingParams(temperature=0.0, max_tokens=6))[0]
        params = llm.frontend.engine.executor.params  # type: ignore[attr-defined]
        held = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
        is_tiled = isinstance(params["unembed"], TiledWeight)
    assert result.outputs[0].text.startswith(" Paris.")
    assert held < 1.4 * smollm2_path.stat().st_size
    assert is_tiled
