"""Options that cannot work end in one clear line; those that can are reported with their reasons."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxserve.config import EngineConfig
from jaxserve.engine.build import build_engine, use_compilation_cache
from jaxserve.engine.executor import step_temp_bytes
from jaxserve.engine.progress import Silent
from jaxserve.engine.threads import pool_size
from jaxserve.errors import ConfigError
from jaxserve.kv_cache import KVCacheSpec

TINY = Path(__file__).resolve().parent.parent / "fixtures" / "models" / "llama_untied"
NOWHERE = Path("there is no model here")
SMALL: dict[str, Any] = {"max_num_seqs": 2, "max_num_batched_tokens": 16, "max_model_len": 64}


def build(path=TINY, **options):
    config = EngineConfig(model="tiny", **(SMALL | options))
    return build_engine(config, path, frozenset(), Silent(), warm_up=False)


def value_of(built, name):
    return built.choices[name].value


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"page_size": 24, "kernels": "xla"}, "^--page-size 24: page size 24 neither divides"),
        ({"max_num_batched_tokens": 3, "max_num_seqs": 4}, "^--max-num-batched-tokens 3 is below --max-num-seqs 4"),
    ],
)
def test_what_is_known_to_fail_fails_before_anything_is_read(options, words):
    with pytest.raises(ConfigError, match=words) as caught:
        build(NOWHERE, **options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_model_len": 513}, "^--max-model-len 513 exceeds the 512 positions the model was made for"),
        ({"num_pages": 3}, r"^--max-model-len 64 needs 4 KV pages and there are 3 \(--num-pages\); lower it to 48"),
        ({"kv_cache_memory_bytes": 100}, "^no KV page fits: one page takes 8,192 bytes and 100 are left"),
        ({"kv_cache_memory_bytes": 20_000}, r"needs 4 KV pages and there are 2 .*; lower it to 32"),
    ],
)
def test_what_the_model_shows_not_to_work(options, words):
    with pytest.raises(ConfigError, match=words) as caught:
        build(**options)
    assert "\n" not in str(caught.value)


def test_the_threads_are_those_of_the_pool():
    assert value_of(build(), "threads") == pool_size()


def test_any_page_size_goes_with_the_reference_kernels():
    built = build(page_size=24, kernels="reference")
    assert (built.page_size, value_of(built, "kernels")) == (24, "reference")
    assert built.choices["kernels"].reason == "named by the user"


def test_every_choice_has_a_reason(tiny):
    wanted = {
        "model", "device", "kernels", "page_size", "dtype", "weight_layout", "max_num_seqs", "max_num_batched_tokens",
        "weights", "kv_cache_dtype", "max_model_len", "kv_pages", "step_shapes", "overlap", "deterministic",
        "enable_prefix_caching", "seed",
    }  # fmt: skip
    assert wanted <= set(tiny.choices)
    assert all(choice.reason for choice in tiny.choices.values())


def test_given_and_chosen_values_are_told_apart(tiny):
    assert tiny.choices["max_num_seqs"].reason == "--max-num-seqs"
    assert tiny.choices["max_model_len"].reason == "--max-model-len"
    assert value_of(tiny, "max_model_len") == tiny.max_model_len == 192
    assert value_of(tiny, "deterministic") is True
    assert value_of(tiny, "dtype") == value_of(tiny, "kv_cache_dtype") == "float32"  # the CPU's
    built = build(max_num_seqs=None, max_num_batched_tokens=None, dtype="bfloat16", kv_cache_dtype="float32", seed=9)
    assert (built.max_num_seqs, built.max_num_batched_tokens) == (32, 512)
    assert built.choices["max_num_seqs"].reason == "default on cpu"
    assert (value_of(built, "dtype"), built.choices["dtype"].reason) == ("bfloat16", "--dtype")
    assert (value_of(built, "kv_cache_dtype"), value_of(built, "seed")) == ("float32", 9)


def test_the_length_follows_the_pages_when_nobody_asked_for_one():
    built = build(max_model_len=None, num_pages=5)
    assert (built.num_pages, built.max_model_len) == (5, 80)
    assert built.choices["max_model_len"].reason == "what the KV pages hold"
    assert build(max_model_len=None).max_model_len == 512


def test_there_are_no_more_pages_than_can_be_used():
    built = build()
    assert built.num_pages == 2 * 64 // 16
    assert "8 pages, 65,536 bytes" in value_of(built, "kv_pages")
    assert build(num_pages=40).num_pages == 40


def test_weights_are_said_to_be_expanded_or_not():
    kept, expanded = build(expand_weights="never"), build(expand_weights="always", dtype="bfloat16")
    assert kept.choices["weights"].reason.startswith("as in the file (F32 ")
    assert value_of(kept, "weights") == f"{kept.loaded.held_bytes:,} bytes"
    assert str(expanded.loaded.params["embed"].array.dtype) == "bfloat16"
    assert value_of(expanded, "weight_layout") == "expanded"


def test_the_compilation_cache_is_where_the_last_engine_wants_it(tmp_path):
    before = jax.config.jax_compilation_cache_dir
    try:
        for number, folder in enumerate((tmp_path / "deep" / "a", tmp_path / "b")):
            use_compilation_cache(folder)
            use_compilation_cache(None)  # says nothing
            jax.jit(lambda x, number=number: x + number).lower(jax.ShapeDtypeStruct((2,), jnp.float32)).compile()
            assert list(folder.iterdir())
    finally:
        use_compilation_cache(Path(before))


def test_temporary_bytes_are_known_before_anything_is_allocated(tiny):
    """What an accelerator's page budget subtracts equals what the real program states, caches being equal."""
    executor = tiny.executor
    shape = executor.shapes[0]
    executor.compile_all(Silent())
    stated = next(report.temp_bytes for report in executor.programs if report.name == str(shape))
    spec = KVCacheSpec(num_layers=2, num_kv_heads=2, head_size=16, page_size=16, dtype="float32")
    assert step_temp_bytes(executor.program, executor.params, shape, spec) == pytest.approx(stated, rel=0.05)
