"""Runs a checkpoint as the engine does, but from outside: a whole prompt at once, or one token at a time."""

import os
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import jax
import jax.numpy as jnp
import numpy as np
from fixture_files import LOGIT_STEP, golden_logits

from checkpoints.load import open_weights
from jaxserve.engine.loading import LoadedModel, Recipe, load_model, read_config
from jaxserve.engine.parameters import ParameterFile
from jaxserve.engine.progress import Silent
from jaxserve.engine.step import Program, logits_of_tokens
from jaxserve.kv_cache import cache_spec, empty_cache
from jaxserve.layers.stack import stack_layers
from jaxserve.models.model import Model
from jaxserve.offline import LLM
from jaxserve.sampling_params import SamplingParams
from pallas_kernels.kernels import XLA
from pallas_kernels.ragged import RaggedLayout
from sharding.spec import paths

FIXTURES = Path(__file__).resolve().parent.parent / "fixtures"
# float32; the reference itself moves by 1e-5 against float64. Half a step of the stored logits is taken off 5e-4.
TOLERANCE = 5e-4 - LOGIT_STEP / 2
PAGE = 16


def golden(folder: Path) -> dict[str, np.ndarray]:
    """What the reference gave, its logits in float32."""
    stored = dict(np.load(folder / "golden.npz"))
    return stored | {"all_logits": golden_logits(stored["all_logits"])}


def whole_prompt_logits(
    path: Path, ids: np.ndarray, kernels=XLA, weights: Any = "expanded", stacked=False
) -> np.ndarray:
    """Logits at every token of one prompt, run as one chunk through the paged cache."""
    loaded, run = _program(path, kernels, weights, len(ids))
    params = loaded.params
    if stacked:
        params = {**params, "layers": stack_layers(params["layers"])}
    pages = -(-len(ids) // PAGE)
    logits, _ = run(
        params, _cache(loaded, pages, kernels), jnp.asarray(ids, jnp.int32), layout_of_one(0, len(ids), pages)
    )
    return np.asarray(logits)


def token_by_token_logits(path: Path, ids: np.ndarray, kernels=XLA, weights: Any = "expanded") -> np.ndarray:
    """The same, every token in a step of its own, as a generation is decoded."""
    loaded, run = _program(path, kernels, weights, len(ids))
    pages = -(-len(ids) // PAGE)
    cache, rows = _cache(loaded, pages, kernels), []
    for position, token in enumerate(ids):
        row, cache = run(
            loaded.params, cache, jnp.asarray([token], jnp.int32), layout_of_one(position, position + 1, pages)
        )
        rows.append(np.asarray(row)[0])
    return np.stack(rows)


def assert_parity(folder: Path, path: Path | None = None, **how: Any) -> None:
    """The golden run's logits at every position of its one prompt that has them."""
    want = golden(folder)
    prompt = int(want["all_logits_prompt"])
    length = int(want["lengths"][prompt])
    got = whole_prompt_logits(path or folder, want["input_ids"][prompt, :length], **how)
    np.testing.assert_allclose(got, want["all_logits"][:length], atol=TOLERANCE, rtol=0)


def assert_last_logits_parity(folder: Path) -> None:
    """The logits behind every prompt of the golden run, of different lengths."""
    want = golden(folder)
    for ids, length, last in zip(want["input_ids"], want["lengths"], want["last_logits"], strict=True):
        got = whole_prompt_logits(folder, ids[:length])
        np.testing.assert_allclose(got[-1], last, atol=TOLERANCE, rtol=0)


def assert_decode_parity(folder: Path, path: Path | None = None) -> None:
    """All logits of the golden run's one prompt, decoded token by token."""
    want = golden(folder)
    prompt = int(want["all_logits_prompt"])
    length = int(want["lengths"][prompt])
    got = token_by_token_logits(path or folder, want["input_ids"][prompt, :length])
    np.testing.assert_allclose(got, want["all_logits"][:length], atol=TOLERANCE, rtol=0)


def assert_greedy_parity(folder: Path, context: int | None = None, at_least: int = 0) -> None:
    """Prompts side by side in an engine, 24 tokens each, up to the reference's first margin below 1e-3.

    context: max_model_len; only prompts that reach from at_least to it are run, by default all three.
    """
    want, new = golden(folder), 24
    chosen = [i for i, n in enumerate(want["lengths"]) if at_least <= n and n + new <= (context or 1 << 20)]
    assert chosen
    prompts = [want["input_ids"][i, : want["lengths"][i]].tolist() for i in chosen]
    options: dict[str, Any] = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "num_pages": 64, "page_size": 16}
    cache = Path(os.environ["JAX_COMPILATION_CACHE_DIR"])
    with LLM(str(folder), compilation_cache_dir=cache, max_model_len=context, **options) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True)
        results = llm.generate([{"prompt_token_ids": p} for p in prompts], params)
    for result, prompt in zip(results, chosen, strict=True):
        ids, margins = want["greedy_ids"][prompt], want["greedy_margin"][prompt]
        close = int(np.argmax(margins < 1e-3)) if (margins < 1e-3).any() else len(ids)
        assert close >= 8
        assert result.outputs[0].token_ids[:close] == ids[:close].tolist()


def written_as_gguf(
    folder: Path,
    path: Path,
    model: Model,
    metadata: dict[str, Any],
    factors: dict[str, float] | None = None,
    extra: dict[str, np.ndarray] | None = None,
    architecture: str | None = None,
) -> Path:
    """A fixture of safetensors as a GGUF of the family's first architecture or a named one, in float32.

    factors: multiplied to parameters of a name, for constants that HF files state and GGUF files do not. extra: tensors
    that are no parameters.
    """
    architecture = architecture or model.gguf_architectures[0]
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in metadata.items():
        add = {int: writer.add_uint32, float: writer.add_float32, bool: writer.add_bool, str: writer.add_string}
        add[type(value)](f"{architecture}.{key}", value)
    with open_weights(folder) as source:
        config = model.config_from_hf(read_config(folder))
        specs = paths(model.param_specs(config))
        file = ParameterFile(source, model.hf_layout, config, specs)
        tensors: dict[str, np.ndarray] = {}
        for parameter, spec in specs.items():
            value = file.vector(parameter) if spec.is_vector else np.asarray(file.matrix(parameter).decode())
            value = value * (factors or {}).get(parameter.rsplit(".", 1)[-1], 1.0)
            stored = model.gguf_layout.stored(parameter, config)
            name = model.gguf_layout.names.tensor_name(parameter)
            tensor = tensors.setdefault(name, np.zeros(stored.shape or spec.shape, np.float32))
            rows = slice(None) if stored.rows is None else stored.rows
            tensor[(rows,) if spec.is_vector else (..., rows, slice(None))] = value
        for name, tensor in sorted((tensors | (extra or {})).items()):
            writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _program(path: Path, kernels, weights: Any, max_len: int) -> tuple[LoadedModel, Any]:
    loaded = load_model(path, Recipe(layout=weights, dtype="float32"), Silent())
    config = loaded.model.for_context(loaded.config, max_len)
    program = Program(model=loaded.model, config=config, kernels=kernels, dtype="float32")
    return loaded, jax.jit(partial(logits_of_tokens, program))


def _cache(loaded: LoadedModel, pages: int, kernels):
    spec = cache_spec(loaded.config, PAGE, "float32")
    return empty_cache(spec, pages, kernels)


def layout_of_one(start: int, end: int, pages: int) -> RaggedLayout:
    """One sequence of `end` tokens on pages in falling order; the tokens from `start` on are in this step."""
    return RaggedLayout(
        kv_lengths=jnp.asarray([end], jnp.int32),
        query_starts=jnp.asarray([0, end - start], jnp.int32),
        page_table=jnp.arange(pages, dtype=jnp.int32)[None, ::-1],
        num_single_rows=int(end - start == 1),
    )
