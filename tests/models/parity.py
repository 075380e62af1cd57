"""Runs a checkpoint as the engine does, but from outside: a whole prompt at once, or one token at a time."""

import os
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import jax
import jax.numpy as jnp
import numpy as np

from checkpoints.load import open_weights
from jaxserve.engine.loading import LoadedModel, Recipe, load_model
from jaxserve.engine.progress import Silent
from jaxserve.engine.step import Program, logits_of_tokens
from jaxserve.kv_cache import KVCacheSpec, empty_cache
from jaxserve.layers.stack import stack_layers
from jaxserve.models.model import Model
from jaxserve.offline import LLM
from jaxserve.sampling_params import SamplingParams
from pallas_kernels.kernels import XLA
from pallas_kernels.ragged import RaggedLayout

FIXTURES = Path(__file__).resolve().parent.parent / "fixtures"
TOLERANCE = 5e-4  # float32; the reference itself moves by 1e-5 against float64
PAGE = 16


def golden(folder: Path):
    return np.load(folder / "golden.npz")


def whole_prompt_logits(
    path: Path, ids: np.ndarray, kernels=XLA, weights: Any = "expanded", stacked=False
) -> np.ndarray:
    """Logits at every token of one prompt, run as one chunk through the paged cache."""
    loaded, run = _program(path, kernels, weights)
    params = loaded.params
    if stacked:
        params = {**params, "layers": stack_layers(params["layers"])}
    pages = -(-len(ids) // PAGE)
    logits, _ = run(params, _cache(loaded, pages, kernels), jnp.asarray(ids, jnp.int32), _layout(0, len(ids), pages))
    return np.asarray(logits)


def token_by_token_logits(path: Path, ids: np.ndarray, kernels=XLA, weights: Any = "expanded") -> np.ndarray:
    """The same, every token in a step of its own, as a generation is decoded."""
    loaded, run = _program(path, kernels, weights)
    pages = -(-len(ids) // PAGE)
    cache, rows = _cache(loaded, pages, kernels), []
    for position, token in enumerate(ids):
        row, cache = run(loaded.params, cache, jnp.asarray([token], jnp.int32), _layout(position, position + 1, pages))
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


def assert_greedy_parity(folder: Path) -> None:
    """Three prompts side by side in an engine, 24 tokens each, up to the reference's first margin below 1e-3."""
    want = golden(folder)
    prompts = [want["input_ids"][i, :n].tolist() for i, n in enumerate(want["lengths"])]
    options: dict[str, Any] = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "num_pages": 64, "page_size": 16}
    cache = Path(os.environ["JAX_COMPILATION_CACHE_DIR"])
    with LLM(str(folder), compilation_cache_dir=cache, **options) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
        results = llm.generate([{"prompt_token_ids": p} for p in prompts], params)
    for result, ids, margins in zip(results, want["greedy_ids"], want["greedy_margin"], strict=True):
        close = int(np.argmax(margins < 1e-3)) if (margins < 1e-3).any() else len(ids)
        assert close >= 8
        assert result.outputs[0].token_ids[:close] == ids[:close].tolist()


def written_as_gguf(
    folder: Path, path: Path, model: Model, metadata: dict[str, Any], factors: dict[str, float] | None = None
) -> Path:
    """A fixture of safetensors as a GGUF of the family's architecture, in float32.

    factors: multiplied to parameters of a name, for constants that HF files state and GGUF files do not.
    """
    architecture = model.gguf_architectures[0]
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in metadata.items():
        add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}[type(value)]
        add(f"{architecture}.{key}", value)
    with open_weights(folder) as source:
        for name in sorted(source.names()):
            parameter = model.hf_layout.names.parameter(name)
            value = np.asarray(source.read(name).data, np.float32) + model.hf_layout.added_to_vectors(parameter)
            value = value * (factors or {}).get(parameter.rsplit(".", 1)[-1], 1.0)
            writer.add_tensor(model.gguf_layout.names.tensor_name(parameter), value.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _program(path: Path, kernels, weights: Any) -> tuple[LoadedModel, Any]:
    loaded = load_model(path, Recipe(layout=weights, dtype="float32"), Silent())
    program = Program(model=loaded.model, config=loaded.config, kernels=kernels, dtype="float32")
    return loaded, jax.jit(partial(logits_of_tokens, program))


def _cache(loaded: LoadedModel, pages: int, kernels):
    config = loaded.config
    spec = KVCacheSpec(
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_size=config.head_size,
        page_size=PAGE,
        dtype="float32",
    )
    return empty_cache(spec, pages, kernels)


def _layout(start: int, end: int, pages: int) -> RaggedLayout:
    """One sequence of `end` tokens on pages in falling order; the tokens from `start` on are in this step."""
    return RaggedLayout(
        kv_lengths=jnp.asarray([end], jnp.int32),
        query_starts=jnp.asarray([0, end - start], jnp.int32),
        page_table=jnp.arange(pages, dtype=jnp.int32)[None, ::-1],
        num_single_rows=int(end - start == 1),
    )
