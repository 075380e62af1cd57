"""Models whose layers have a window or none: pages that left the windows go back, and not a token changes.

Gemma 3, Gemma 2 and gpt-oss of three layers, two of them with a window of 24 or 32 tokens: three groups of one layer.
"""

import dataclasses
import itertools
import json
import os
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engines import add, alone, engine_over, finish, note, random_prompt

from jaxserve.config import EngineConfig
from jaxserve.engine.build import BuiltEngine, build_engine
from jaxserve.engine.decisions import Decisions
from jaxserve.engine.loading import Recipe, load_model
from jaxserve.engine.progress import Silent
from jaxserve.engine.step import Program, logits_of_tokens
from jaxserve.errors import ConfigError
from jaxserve.kv_cache import cache_spec
from jaxserve.layer_groups import GroupedLayout, layer_groups
from jaxserve.layers.stack import stack_layers
from jaxserve.sampling_params import SamplingParams
from jaxserve.scheduler.page_need import sequence_need
from pallas_kernels.kernels import XLA
from pallas_kernels.ragged import RaggedLayout

FIXTURES = Path(__file__).resolve().parent.parent / "fixtures"
VOCAB, MAX_LEN, PAGE, CHUNK = 256, 320, 16, 64
NAMES = ["gemma3_text", "gemma2", "gpt_oss"]
GREEDY = SamplingParams(temperature=0.0, max_tokens=80, ignore_eos=True, logprobs=0)


def build(path: Path, **options: Any) -> BuiltEngine:
    sizes: dict[str, Any] = {"max_num_seqs": 2, "max_num_batched_tokens": CHUNK, "max_model_len": MAX_LEN}
    sizes |= {"kernels": "xla", "compilation_cache_dir": Path(os.environ["JAX_COMPILATION_CACHE_DIR"])}
    config = EngineConfig(model=str(path), deterministic=True, **(sizes | options))
    return build_engine(config, path, frozenset(), Silent(), warm_up=False)


def build_keeping(path: Path, **options: Any) -> BuiltEngine:
    """The same with one page table for all layers, which keeps all pages."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Decisions, "groups", lambda *_: None)
        built = build(path, **options)
    assert built.executor.shapes[0].groups is None
    return built


def groups_of(built: BuiltEngine) -> Any:
    groups = built.executor.shapes[0].groups
    assert groups is not None
    return groups


@pytest.fixture(scope="module", params=NAMES)
def model(request):
    """An engine that frees, prompts, and what each comes to alone in an engine that keeps everything."""
    path = FIXTURES / "models" / request.param
    keeping = build_keeping(path)
    prompts = [random_prompt(length, VOCAB, length) for length in (40, 60, 12, 150)]
    wants = [alone(keeping, prompt, GREEDY) for prompt in prompts]
    keeping.engine.close()
    built = build(path)
    yield built, prompts, wants
    built.engine.close()


def least_pages(built: BuiltEngine, num_tokens: int) -> int:
    groups = groups_of(built)
    tables = (groups.num_full, groups.num_windowed)
    return sequence_need(groups.window, PAGE, CHUNK, tables).least_for(num_tokens)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(
    ("is_tight", "chunk", "caching"), [(False, 64, True), (False, 7, False), (True, 64, True), (True, 23, False)]
)
def test_freed_equals_kept(model, is_tight, chunk, caching, overlap):
    """Several windows long, in chunks longer and shorter than the window, beside others, preempted or not."""
    built, prompts, wants = model
    num_pages = least_pages(built, 230) + 2 if is_tight else built.num_pages
    engine = engine_over(
        built, overlap=overlap, num_pages=num_pages, max_prefill_chunk=chunk, enable_prefix_caching=caching
    )
    for i, prompt in enumerate(prompts):
        add(engine, str(i), prompt, GREEDY)
    outcomes = finish(engine)
    stats = engine.scheduler.stats()
    assert stats.num_left_pages >= 2 * 20
    assert (stats.num_preemptions > 0) == is_tight
    assert stats.num_running_pages == 0
    for i, want in enumerate(wants):
        assert outcomes[str(i)].token_ids == want.token_ids
        assert outcomes[str(i)].logprobs == pytest.approx(want.logprobs, abs=1e-4)


def test_a_hit_equals_a_miss(model):
    """All full pages of the prefix and the last window's others; what stood before that was evicted."""
    built, prompts, wants = model
    engine = engine_over(built, num_pages=40)
    for name, prompt in (("first", prompts[3]), ("other", random_prompt(100, VOCAB, 0))):
        add(engine, name, prompt, SamplingParams(max_tokens=1))
        finish(engine)
    assert engine.scheduler.stats().num_cached_pages < 3 * (150 // PAGE + 100 // PAGE)
    add(engine, "again", prompts[3], GREEDY)
    outcome = finish(engine)["again"]
    assert outcome.num_cached_tokens == 144
    assert outcome.token_ids == wants[3].token_ids


def test_pages_in_use_stay_bounded(model):
    """A sequence of more than ten windows holds all its pages in one table, and a few in each of the other two."""
    built, _, _ = model
    groups = groups_of(built)
    assert (groups.num_full, groups.num_windowed, groups.layers_per_group) == (1, 2, 1)
    engine, outcomes = built.engine, {}
    add(engine, "r", random_prompt(20, VOCAB, 1), dataclasses.replace(GREEDY, max_tokens=290))
    in_window = -(-groups.window // PAGE) + 1  # tokens of a window, the one in flight with them, may touch so many
    before = engine.scheduler.stats().num_left_pages
    while engine.has_work:
        for event in engine.step():
            note(outcomes, event)
        assert engine.scheduler.stats().num_running_pages <= -(-310 // PAGE) + 2 * in_window
    assert len(outcomes["r"].token_ids) == 290
    assert engine.scheduler.stats().num_left_pages - before == 2 * ((309 - groups.window + 1) // PAGE)


def test_memory_is_what_was_computed(model):
    built, _, _ = model
    groups, config = groups_of(built), built.loaded.config
    most = -(-(groups.window - 1 + 2 * CHUNK) // PAGE) + 1
    page_bytes = 2 * config.num_kv_heads * config.head_size * 4 * PAGE  # of one layer: keys and values in float32
    assert built.num_pages == 2 * (MAX_LEN // PAGE + 2 * most)
    cache = built.executor._cache
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(cache)) == built.num_pages * page_bytes
    choices = built.choices
    freed = f"pages that left the window of {groups.window} tokens are freed in 2 of 3 layers"
    assert choices["window"].value == freed
    held, together = MAX_LEN // PAGE + 2 * 4, 3 * MAX_LEN // PAGE
    assert choices["window"].reason == (
        "3 groups of up to 1 layers have a page table each; 320 tokens hold "
        f"{held * page_bytes:,} bytes while more are generated, instead of {together * page_bytes:,}"
    )
    assert choices["kv_pages"].value == f"{built.num_pages:,} pages, {built.num_pages * page_bytes:,} bytes"
    assert choices["kv_pages"].reason.endswith("; a token takes 3 at first, one for each group")
    keeping = build_keeping(FIXTURES / "models" / "gemma2")
    assert built.num_pages < 3 * keeping.num_pages  # a page of the other is of three layers
    keeping.engine.close()


def test_a_given_number_of_pages_is_one_of_each_group():
    path = FIXTURES / "models" / "gemma2"
    built = build(path, num_pages=20, max_num_seqs=1)
    assert built.num_pages == 60
    with pytest.raises(
        ConfigError, match=r"needs 26 KV pages and there are 24 \(--num-pages, for each of 3 groups.* lower it to 288"
    ):
        build(path, num_pages=8)
    # 24 - 2 * 3 pages would do for 288 tokens, but a prompt would then be computed in very small chunks.
    assert build(path, num_pages=8, max_model_len=None).max_model_len == 8 * PAGE


def test_no_room_for_a_page_in_every_group_is_an_error():
    page_bytes = 2 * 2 * 24 * 4 * PAGE
    with pytest.raises(ConfigError, match=rf"^no KV page fits: one page takes {3 * page_bytes:,} bytes and"):
        build(FIXTURES / "models" / "gemma2", kv_cache_memory_bytes=3 * page_bytes - 1)


def test_qwen_with_windows_from_some_layer_on(tmp_path):
    """Two layers, the second with a window, and an int8 cache."""
    path = tmp_path / "qwen2"
    shutil.copytree(FIXTURES / "models" / "qwen2_bias", path)
    config = json.loads((path / "config.json").read_text())
    window = {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1}
    (path / "config.json").write_text(json.dumps(config | window))
    keeping, built = (make(path, kv_cache_dtype="int8") for make in (build_keeping, build))
    assert (groups_of(built).num_full, groups_of(built).num_windowed) == (1, 1)
    prompt = random_prompt(150, VOCAB, 0)
    want, got = (alone(engine, prompt, GREEDY) for engine in (keeping, built))
    assert got.token_ids == want.token_ids
    assert built.num_pages < 2 * keeping.num_pages
    for engine in (keeping, built):
        engine.engine.close()


def test_the_cpu_kernels_cache(tmp_path):
    path = FIXTURES / "gguf" / "gguf_gpt_oss" / "model.gguf"
    sizes: dict[str, Any] = {"kernels": "cpu", "kv_cache_dtype": "int8"}
    keeping, built = (make(path, **sizes) for make in (build_keeping, build))
    prompts = [random_prompt(length, VOCAB, length) for length in (40, 130)]
    engine = engine_over(built, num_pages=least_pages(built, 210) + 2)
    for i, prompt in enumerate(prompts):
        add(engine, str(i), prompt, GREEDY)
    outcomes = finish(engine)
    assert engine.scheduler.stats().num_left_pages > 0
    for i, prompt in enumerate(prompts):
        assert outcomes[str(i)].token_ids == alone(keeping, prompt, GREEDY).token_ids
    for engine in (keeping, built):
        engine.engine.close()


@pytest.mark.parametrize(
    ("windows", "stacked"),
    [
        ((8, None, 8), True),
        ((None, 8, None, 8, 8), False),
        ((None, 8, None, 8, 8), True),
        ((None, None, None, None, 8, 8, None, 8, 8), True),
    ],
)
def test_groups_of_any_size_give_the_same_logits(windows, stacked):
    """Groups of several layers, with room for layers that do not exist; layers one by one and scanned; no page kept
    that no token sees."""
    loaded = load_model(FIXTURES / "models" / "gpt_oss", Recipe(layout="expanded", dtype="float32"), Silent())
    config = dataclasses.replace(loaded.config, num_layers=len(windows), windows=windows)
    layers = tuple(itertools.islice(itertools.cycle(loaded.params["layers"]), len(windows)))
    params = {**loaded.params, "layers": stack_layers(layers) if stacked else layers}
    program = Program(model=loaded.model, config=config, kernels=XLA, dtype="float32")
    run = jax.jit(lambda *arguments: logits_of_tokens(program, *arguments))
    groups = layer_groups(windows, PAGE, 10, 100)
    assert groups is not None
    num_pages = 10
    numbers = np.random.default_rng(0).permutation(groups.num_groups * num_pages).astype(np.int32)
    tables = numbers.reshape(groups.num_groups, num_pages)
    spec = cache_spec(config, PAGE, "float32", groups.layers_per_group)
    together, apart = (
        program.new_cache(cache_spec(config, PAGE, "float32"), num_pages),
        program.new_cache(spec, len(numbers)),
    )
    ids = np.asarray(random_prompt(130, VOCAB, 0), np.int32)
    for start, end in ((0, 60), (60, 64), (64, 65), (65, 130)):
        layout = RaggedLayout(
            kv_lengths=jnp.asarray([end], jnp.int32),
            query_starts=jnp.asarray([0, end - start], jnp.int32),
            page_table=jnp.arange(num_pages, dtype=jnp.int32)[None],
            num_single_rows=int(end - start == 1),
        )
        tables[groups.num_full :, : max(0, start - 7) // PAGE] = -1
        paging = GroupedLayout(
            layouts=tuple(dataclasses.replace(layout, page_table=jnp.asarray(table)[None]) for table in tables),
            places=groups.places,
        )
        want, together = run(params, together, ids[start:end], layout)
        got, apart = run(params, apart, ids[start:end], paging)
        np.testing.assert_allclose(got, want, atol=1e-5)  # float32
