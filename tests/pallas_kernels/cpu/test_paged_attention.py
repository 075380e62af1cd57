"""Attention over pages on CPUs: against the definition, and against itself in other batches, chunks and threads."""

import dataclasses
import itertools
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.cpu.levels import LEVELS, level_named
from pallas_kernels.cpu.targets import NotRegistered, Targets, register
from pallas_kernels.kv_pages import KVPages
from pallas_kernels.paged_attention import cpu, reference
from pallas_kernels.paged_attention.cases import CASES, Case
from pallas_kernels.ragged import RaggedLayout

ROOT = Path(__file__).resolve().parents[3]
REFUSED = (ValueError, jax.errors.JaxRuntimeError)  # jax raises the first when it runs an operation by itself
DTYPES = ["float32", "bfloat16", "int8"]
# float32 sums of up to 1400 terms in another order; the reference reads the same rounded pages
TOLERANCE = 2e-6
ALL_CASES = [
    *(case for case in CASES if case.page_size % 16 == 0),
    Case(name="spans", num_heads=3, num_kv_heads=1, head_size=48, page_size=32, rows=((1, 1400), (3, 600), (1, 512))),
    Case(name="many-heads", num_heads=40, num_kv_heads=1, head_size=80, page_size=16, rows=((1, 70), (2, 3))),
    Case(name="head-256", num_heads=2, num_kv_heads=2, head_size=256, page_size=16, rows=((1, 65), (20, 40))),
    Case(
        name="window-spans",
        num_heads=2,
        num_kv_heads=1,
        head_size=16,
        page_size=16,
        window=40,
        rows=((1, 560), (9, 515)),
    ),
]


@pytest.fixture(scope="session")
def attention(kernel_cache):
    """The kernels of all dtypes, for this CPU."""
    return register([f for dtype in DTYPES for f in cpu.functions_of(dtype)], cache_dir=kernel_cache)


def build(case: Case, dtype: str, unused: float = 0.0):
    """Queries, pages, layout and options; `unused` is what slots and pages hold that no sequence has."""
    rng = np.random.default_rng(0)
    singles = [row for row in case.rows if row[0] == 1]
    rows = [*singles, (1, 0), *(row for row in case.rows if row[0] > 1), (0, 0)]
    needs = [-(-kv // case.page_size) for _, kv in rows]
    num_pages = sum(needs) + 3
    free = rng.permutation(num_pages)
    table = np.full((len(rows), max(needs) + 1), num_pages + 7, np.int32)
    shape = (num_pages, case.page_size, case.num_kv_heads, case.head_size)
    used = np.zeros(shape[:2], bool)
    for i, (_, kv) in enumerate(rows):
        table[i, : needs[i]], free = free[: needs[i]], free[needs[i] :]
        for position in range(kv):
            used[table[i, position // case.page_size], position % case.page_size] = True
    cache = rng.standard_normal((2, 2, *shape), np.float32)
    cache[:, :, ~used] = unused
    starts = np.concatenate([[0], np.cumsum([n for n, _ in rows])]).astype(np.int32)
    layout = RaggedLayout(
        query_starts=jnp.asarray(starts),
        kv_lengths=jnp.asarray([kv for _, kv in rows], jnp.int32),
        page_table=jnp.asarray(table),
        num_single_rows=len(singles) + 1,
    )
    q = rng.standard_normal((int(starts[-1]) + 3, case.num_heads, case.head_size), np.float32)
    sinks = jnp.asarray(rng.standard_normal(case.num_heads, np.float32)) if case.sinks else None
    options = {"scale": case.head_size**-0.5, "window": case.window, "soft_cap": case.soft_cap, "sinks": sinks}
    pages = cpu.encode_pages(jnp.asarray(cache[0]), jnp.asarray(cache[1]), dtype)
    return jnp.asarray(q), pages, layout, options


def case_named(name: str) -> Case:
    return next(case for case in ALL_CASES if case.name == name)


def wanted(q, pages: KVPages, layout: RaggedLayout, options) -> np.ndarray:
    k, v = cpu.decode_pages(pages)
    return np.asarray(reference.paged_attention(q, KVPages(k=k, v=v), 1, layout, **options))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", ALL_CASES, ids=lambda case: case.name)
def test_matches_the_reference(attention, case, dtype):
    q, pages, layout, options = build(case, dtype)
    got = cpu.paged_attention(q, pages, 1, layout, targets=attention, **options)
    np.testing.assert_allclose(got, wanted(q, pages, layout, options), atol=TOLERANCE)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", ALL_CASES, ids=lambda case: case.name)
def test_unused_slots_and_pages_do_not_leak(attention, case, dtype):
    """int8 slots are poisoned through their scales."""
    q, pages, layout, options = build(case, dtype)
    poisoned = build(case, dtype, unused=np.nan)[1]
    want = cpu.paged_attention(q, pages, 1, layout, targets=attention, **options)
    np.testing.assert_array_equal(cpu.paged_attention(q, poisoned, 1, layout, targets=attention, **options), want)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["window", "window-spans"])
def test_page_numbers_before_the_window_count_for_nothing(attention, name, dtype):
    """Not in one bit: -1 stands where a page was given back, and another's page would do no harm either."""
    case = case_named(name)
    q, pages, layout, options = build(case, dtype)
    whole = cpu.paged_attention(q, pages, 1, layout, targets=attention, **options)
    num_queries = np.diff(layout.query_starts)
    firsts = np.maximum(0, np.asarray(layout.kv_lengths) - num_queries + 1 - case.window) // case.page_size
    for number in (-1, 0, pages.k.shape[1], 2**31 - 1):
        table = np.array(layout.page_table)
        for row, first in enumerate(firsts):
            table[row, :first] = number
        changed = dataclasses.replace(layout, page_table=jnp.asarray(table))
        np.testing.assert_array_equal(cpu.paged_attention(q, pages, 1, changed, targets=attention, **options), whole)
    assert firsts[0] > 5
    table[0, firsts[0]] = -1  # seen in part
    changed = dataclasses.replace(layout, page_table=jnp.asarray(table))
    got = cpu.paged_attention(q, pages, 1, changed, targets=attention, **options)
    assert not np.array_equal(got, whole)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["smollm2-chunk", "spans", "window", "window-spans", "sinks", "many-heads"])
def test_a_query_does_not_depend_on_its_batch_or_chunk(attention, name, dtype):
    q, pages, layout, options = build(case_named(name), dtype)
    whole = np.asarray(cpu.paged_attention(q, pages, 1, layout, targets=attention, **options))
    starts, lengths = np.asarray(layout.query_starts), np.asarray(layout.kv_lengths)
    for b, (first, end) in enumerate(itertools.pairwise(starts)):
        for step in (1, 7):
            for start in range(first, end, step):
                stop = min(start + step, end)
                part = RaggedLayout(
                    kv_lengths=jnp.asarray([lengths[b] - (end - stop)], jnp.int32) if lengths[b] else jnp.zeros(1, int),
                    query_starts=jnp.asarray([0, stop - start], jnp.int32),
                    page_table=layout.page_table[b : b + 1],
                    num_single_rows=0,
                )
                got = cpu.paged_attention(q[start:stop], pages, 1, part, targets=attention, **options)
                np.testing.assert_array_equal(got, whole[start:stop])


def test_a_later_value_never_touches_an_earlier_query(attention):
    """Not even one that is no number."""
    case = Case(name="", num_heads=3, num_kv_heads=1, head_size=32, page_size=16, rows=((30, 90),))
    q, pages, layout, options = build(case, "float32")
    want = np.asarray(cpu.paged_attention(q, pages, 1, layout, targets=attention, **options))
    page = int(layout.page_table[1, 75 // 16])
    bad = dataclasses.replace(pages, v=pages.v.at[1, page, 0, 75 % 16].set(jnp.nan))
    got = np.asarray(cpu.paged_attention(q, bad, 1, layout, targets=attention, **options))
    np.testing.assert_array_equal(got[1:16], want[1:16])
    assert np.isnan(got[16:31]).all()


def test_pages_outside_the_cache_read_as_zeros(attention):
    q, pages, layout, options = build(case_named("mixed"), "float32")
    for bad in (-1, 10_000, 2**31 - 1, -(2**31)):
        broken = dataclasses.replace(layout, page_table=layout.page_table.at[:, 1].set(bad))
        got = cpu.paged_attention(q, pages, 1, broken, targets=attention, **options)
        np.testing.assert_allclose(got, wanted(q, pages, broken, options), atol=TOLERANCE)


def test_a_sequence_longer_than_its_table(attention):
    q, pages, layout, options = build(case_named("mixed"), "float32")
    longer = dataclasses.replace(layout, page_table=layout.page_table[:, :2])
    got = cpu.paged_attention(q, pages, 1, longer, targets=attention, **options)
    np.testing.assert_allclose(got, wanted(q, pages, longer, options), atol=TOLERANCE)


def test_no_tokens_give_no_result(attention):
    q, pages, layout, options = build(case_named("mixed"), "float32")
    empty = dataclasses.replace(layout, query_starts=jnp.zeros_like(layout.query_starts))
    assert cpu.paged_attention(q[:0], pages, 1, empty, targets=attention, **options).shape == (0, 4, 32)


ONE_CASE = """
import sys
from pathlib import Path
import numpy as np
sys.path.insert(0, sys.argv[2])
import test_paged_attention as tests
from pallas_kernels.cpu.targets import register
targets = register(tests.cpu.functions_of("float32"), cache_dir=Path(sys.argv[1]))
for name in ("spans", "window-spans", "smollm2-chunk"):
    q, pages, layout, options = tests.build(tests.case_named(name), "float32")
    out = np.asarray(tests.cpu.paged_attention(q, pages, 1, layout, targets=targets, **options))
    print(out.tobytes().hex())
"""


def test_the_number_of_threads_does_not_matter(attention, kernel_cache):
    def results(num_threads: str) -> str:
        environment = {**os.environ, "NPROC": num_threads, "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-c", ONE_CASE, str(kernel_cache), str(Path(__file__).parent)]
        return subprocess.run(command, env=environment, check=True, timeout=200, capture_output=True, text=True).stdout

    one = results("1")
    assert len(one) > 10_000
    assert all(results(num_threads) == one for num_threads in ("2", "8"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"window": 0}, "a window of 0 tokens sees nothing"),
        ({"soft_cap": -1.0}, "soft cap -1.0 must be positive"),
    ],
)
def test_refuses_options(attention, change, message):
    q, pages, layout, options = build(case_named("mixed"), "float32")
    with pytest.raises(ValueError, match=message):
        cpu.paged_attention(q, pages, 1, layout, targets=attention, **{**options, **change})


def test_refuses_shapes(attention):
    q, pages, layout, options = build(case_named("mixed"), "float32")
    for heads, message in (
        (q[:, :3], "3 query heads are no multiple of 2"),
        (q[..., :16], "do not fit 2 kv heads of 16"),
    ):
        with pytest.raises(ValueError, match=message):
            cpu.paged_attention(heads, pages, 1, layout, targets=attention, **options)
    with pytest.raises(ValueError, match="page size 8 is no multiple of 16"):
        cpu.new_pages(num_layers=1, num_pages=1, page_size=8, num_kv_heads=1, head_size=16, dtype="int8")
    with pytest.raises(ValueError, match="head size 24: the CPU kernels take multiples of 16 up to 256"):
        cpu.new_pages(num_layers=1, num_pages=1, page_size=16, num_kv_heads=1, head_size=24, dtype="int8")
    with pytest.raises(ValueError, match="no CPU kernel for pages of float16; choose float32, bfloat16, int8"):
        cpu.functions_of("float16")
    with pytest.raises(NotRegistered, match="attend_float32 is not registered"):
        cpu.paged_attention(q, pages, 1, layout, targets=Targets(level="generic", names={}), **options)


@pytest.mark.parametrize(
    ("starts", "message"),
    [
        ([0, 2, 1, 3, 7, 7, 7], r"query_starts must ascend .*; \[2\] = 1, T = 75"),
        ([0, 1, 2, 3, 76, 76, 76], r"query_starts must ascend .*; \[4\] = 76, T = 75"),
        ([-1, 1, 2, 3, 7, 7, 7], r"query_starts must ascend .*; \[0\] = -1, T = 75"),
    ],
)
def test_the_machine_code_refuses_layouts(attention, starts, message):
    q, pages, layout, options = build(case_named("mixed"), "float32")
    bad = dataclasses.replace(layout, query_starts=jnp.asarray(starts, jnp.int32))
    with pytest.raises(REFUSED, match=message):
        jax.block_until_ready(cpu.paged_attention(q, pages, 1, bad, targets=attention, **options))


@pytest.mark.parametrize("layer", [-1, 2])
def test_the_machine_code_refuses_layers(attention, layer):
    q, pages, layout, options = build(case_named("mixed"), "int8")
    with pytest.raises(REFUSED, match=f"paged_attention int8: layer {layer} of 2"):
        jax.block_until_ready(cpu.paged_attention(q, pages, layer, layout, targets=attention, **options))


@pytest.mark.parametrize("dtype", DTYPES)
def test_self_test_is_small(attention, dtype):
    assert cpu.self_test(attention, dtype) < 1e-5


def test_self_test_sees_a_wrong_kernel(attention, monkeypatch):
    attend = cpu.paged_attention
    monkeypatch.setattr(cpu, "paged_attention", lambda *a, **k: attend(*a, **k) * 1.001)
    assert cpu.self_test(attention, "float32") > 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("level", [level.name for level in LEVELS[1:]])
def test_lesser_cpus(kernel_cache, level):
    """The other lowerings of each operation."""
    try:
        level_named(level)
    except ValueError as error:
        pytest.skip(str(error))
    for dtype in DTYPES:
        targets = register(cpu.functions_of(dtype), cache_dir=kernel_cache, level=level)
        assert cpu.self_test(targets, dtype) < 1e-5
        for case in ALL_CASES:
            test_matches_the_reference(targets, case, dtype)
