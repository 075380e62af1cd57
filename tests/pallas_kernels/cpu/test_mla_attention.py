"""MLA on CPUs: against the definition, and against itself in other batches, chunks and threads."""

import dataclasses
import itertools
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.cpu.levels import LEVELS, level_named
from pallas_kernels.cpu.targets import NotRegistered, Targets, register
from pallas_kernels.mla_attention import cpu, reference
from pallas_kernels.mla_attention.cases import CASES, Case, inputs_of
from pallas_kernels.mla_attention.latent_pages import LatentPages
from pallas_kernels.ragged import RaggedLayout

ROOT = Path(__file__).resolve().parents[3]
REFUSED = (ValueError, jax.errors.JaxRuntimeError)  # jax raises the first when it runs an operation by itself
DTYPES = ["float32", "bfloat16"]
# float32 sums of up to 1400 terms in another order; the reference reads the same rounded pages
TOLERANCE = 4e-6
OWN_CASES = (
    Case(name="page-48", num_heads=6, latent_size=32, rope_size=16, page_size=48, rows=((1, 100), (20, 97))),
    Case(name="no-rope", num_heads=4, latent_size=64, rope_size=0, page_size=16, rows=((1, 20), (5, 30))),
)
ALL_CASES = (*CASES, *OWN_CASES)
PARAMS = [pytest.param(c, id=c.name, marks=[pytest.mark.slow] if c.is_large else []) for c in ALL_CASES]


@pytest.fixture(scope="session")
def mla(kernel_cache):
    """The kernels of all dtypes, for this CPU."""
    return register(cpu.all_functions(), cache_dir=kernel_cache)


def case_named(name: str) -> Case:
    return next(case for case in ALL_CASES if case.name == name)


def wanted(q, pages, layout, options):
    return np.asarray(reference.mla_attention(q, pages, 1, layout, **options))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", PARAMS)
def test_matches_the_reference(mla, case, dtype):
    q, pages, layout, options = inputs_of(case, dtype)
    got = cpu.mla_attention(q, pages, 1, layout, targets=mla, **options)
    np.testing.assert_allclose(got, wanted(q, pages, layout, options), atol=TOLERANCE)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", PARAMS)
def test_unused_slots_and_pages_do_not_leak(mla, case, dtype):
    q, pages, layout, options = inputs_of(case, dtype)
    poisoned = inputs_of(case, dtype, unused=np.nan)[1]
    want = cpu.mla_attention(q, pages, 1, layout, targets=mla, **options)
    np.testing.assert_array_equal(cpu.mla_attention(q, poisoned, 1, layout, targets=mla, **options), want)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["v2-lite-chunk", "mixed", "odd-heads", "many-heads", "spans", "page-48"])
def test_a_query_does_not_depend_on_its_batch_or_chunk(mla, name, dtype):
    q, pages, layout, options = inputs_of(case_named(name), dtype)
    whole = np.asarray(cpu.mla_attention(q, pages, 1, layout, targets=mla, **options))
    starts, lengths = np.asarray(layout.query_starts), np.asarray(layout.kv_lengths)
    for b, (first, end) in enumerate(itertools.pairwise(starts)):
        for step in (1, 5):
            for start in range(first, end, step):
                stop = min(start + step, end)
                part = RaggedLayout(
                    kv_lengths=jnp.asarray([max(lengths[b] - (end - stop), 0)], jnp.int32),
                    query_starts=jnp.asarray([0, stop - start], jnp.int32),
                    page_table=layout.page_table[b : b + 1],
                    num_single_rows=0,
                )
                got = cpu.mla_attention(q[start:stop], pages, 1, part, targets=mla, **options)
                np.testing.assert_array_equal(got, whole[start:stop])


@pytest.mark.parametrize("dtype", DTYPES)
def test_heads_do_not_depend_on_one_another(mla, dtype):
    """Nor on how many go through the registers together."""
    q, pages, layout, options = inputs_of(case_named("odd-heads"), dtype)
    whole = np.asarray(cpu.mla_attention(q, pages, 1, layout, targets=mla, **options))
    for heads in (slice(0, 1), slice(2, 4), slice(1, 6), slice(3, 7)):
        got = cpu.mla_attention(q[:, heads], pages, 1, layout, targets=mla, **options)
        np.testing.assert_array_equal(got, whole[:, heads])


def test_a_later_latent_never_touches_an_earlier_query(mla):
    """Not even one that is no number."""
    case = dataclasses.replace(case_named("odd-heads"), rows=((30, 90),))
    q, pages, layout, options = inputs_of(case, "float32")
    want = np.asarray(cpu.mla_attention(q, pages, 1, layout, targets=mla, **options))
    page = int(layout.page_table[1, 75 // 32])
    bad = LatentPages(latent=pages.latent.at[1, page, 75 % 32].set(jnp.nan))
    got = np.asarray(cpu.mla_attention(q, bad, 1, layout, targets=mla, **options))
    np.testing.assert_array_equal(got[1:16], want[1:16])
    assert np.isnan(got[16:31]).all()


def test_pages_outside_the_cache_read_as_zeros(mla):
    q, pages, layout, options = inputs_of(case_named("mixed"), "float32")
    for bad in (-1, 10_000, 2**31 - 1, -(2**31)):
        broken = dataclasses.replace(layout, page_table=layout.page_table.at[:, 1].set(bad))
        got = cpu.mla_attention(q, pages, 1, broken, targets=mla, **options)
        np.testing.assert_allclose(got, wanted(q, pages, broken, options), atol=TOLERANCE)


def test_a_sequence_longer_than_its_table(mla):
    q, pages, layout, options = inputs_of(case_named("mixed"), "bfloat16")
    longer = dataclasses.replace(layout, page_table=layout.page_table[:, :2])
    got = cpu.mla_attention(q, pages, 1, longer, targets=mla, **options)
    np.testing.assert_allclose(got, wanted(q, pages, longer, options), atol=TOLERANCE)


def test_no_tokens_give_no_result(mla):
    q, pages, layout, options = inputs_of(case_named("mixed"), "float32")
    empty = dataclasses.replace(layout, query_starts=jnp.zeros_like(layout.query_starts))
    assert cpu.mla_attention(q[:0], pages, 1, empty, targets=mla, **options).shape == (0, 8, 64)
    written = cpu.write_latent(q[:0, 0], pages, 1, empty, targets=mla)
    np.testing.assert_array_equal(written.latent, pages.latent)


ONE_CASE = """
import sys
from pathlib import Path
import numpy as np
sys.path.insert(0, sys.argv[2])
import test_mla_attention as tests
from pallas_kernels.cpu.targets import register
targets = register(tests.cpu.functions_of("float32"), cache_dir=Path(sys.argv[1]))
for name in ("spans", "mixed", "v2-lite-chunk"):
    q, pages, layout, options = tests.inputs_of(tests.case_named(name), "float32")
    out = np.asarray(tests.cpu.mla_attention(q, pages, 1, layout, targets=targets, **options))
    print(out.tobytes().hex())
"""


def test_the_number_of_threads_does_not_matter(mla, kernel_cache):
    def results(num_threads: str) -> str:
        environment = {**os.environ, "NPROC": num_threads, "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-c", ONE_CASE, str(kernel_cache), str(Path(__file__).parent)]
        return subprocess.run(command, env=environment, check=True, timeout=200, capture_output=True, text=True).stdout

    one = results("1")
    assert len(one) > 10_000
    assert all(results(num_threads) == one for num_threads in ("2", "8"))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["v2-lite-chunk", "mixed", "page-48"])
def test_a_write_is_that_of_the_reference(mla, name, dtype):
    """Bit for bit, in one layer, with padding tokens and pages outside the cache dropped."""
    q, pages, layout, _ = inputs_of(case_named(name), dtype)
    table = layout.page_table.at[0, 0].set(-1).at[2, 1].set(10_000)
    layout = dataclasses.replace(layout, page_table=table)
    want = reference.write_latent(q[:, 0], pages, 1, layout).latent
    got = cpu.write_latent(q[:, 0], pages, 1, layout, targets=mla).latent
    np.testing.assert_array_equal(got.astype(jnp.float32), want.astype(jnp.float32))
    assert (got != pages.latent).any()


def test_rounding_to_bfloat16_keeps_what_is_no_number(mla):
    q, pages, layout, _ = inputs_of(case_named("one-head"), "bfloat16")
    special = [np.nan, np.inf, -np.inf, 3.4e38, 1.0 + 2.0**-9, 1.0 + 3 * 2.0**-9]
    latent = q[:, 0].at[0, :6].set(jnp.asarray(special))
    want = reference.write_latent(latent, pages, 0, layout).latent.astype(jnp.float32)
    got = cpu.write_latent(latent, pages, 0, layout, targets=mla).latent.astype(jnp.float32)
    np.testing.assert_array_equal(got, want)
    assert np.isnan(np.asarray(got)).sum() == 1


def test_a_step_of_several_layers_copies_no_cache(mla):
    """A copy of it in any layer would cost more than the whole step."""
    q, pages, layout, options = inputs_of(case_named("mixed"), "float32")

    def step(pages: LatentPages, q):
        out = 0.0
        for layer in range(2):
            pages = cpu.write_latent(q[:, 0] + out, pages, layer, layout, targets=mla)
            attended = cpu.mla_attention(q, pages, layer, layout, targets=mla, **options)
            out = out + attended.sum()
        return pages, out

    compiled = jax.jit(step, donate_argnums=0).lower(pages, q).compile()
    shape = ",".join(map(str, pages.latent.shape))
    copies = re.findall(r"= \w+\[([\d,]+)\][^ ]* copy\(", compiled.as_text() or "")
    assert shape not in copies


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"page_size": 8}, "page size 8 is no multiple of 16"),
        ({"latent_size": 24}, r"latents of 24 \+ 16 values: the CPU kernels take multiples of 16, up to 1024 together"),
        ({"rope_size": 8}, r"latents of 32 \+ 8 values"),
        ({"latent_size": 1024}, r"latents of 1024 \+ 16 values"),
        ({"latent_size": 0}, r"latents of 0 \+ 16 values"),
        ({"dtype": "int8"}, "no CPU kernel for latents of int8; choose float32, bfloat16"),
    ],
)
def test_refuses_geometries(sizes, message):
    good = {"num_layers": 1, "num_pages": 1, "page_size": 16, "latent_size": 32, "rope_size": 16, "dtype": "float32"}
    cpu.new_pages(**good)
    with pytest.raises(ValueError, match=message):
        cpu.new_pages(**{**good, **sizes})


def test_refuses_shapes(mla):
    q, pages, layout, options = inputs_of(case_named("mixed"), "float32")
    with pytest.raises(ValueError, match="do not hold keys of 64 values; make them with new_pages"):
        cpu.mla_attention(q[..., :64], pages, 1, layout, targets=mla, **options)
    with pytest.raises(ValueError, match="do not hold keys of 64 values"):
        cpu.write_latent(q[:, 0, :64], pages, 1, layout, targets=mla)
    with pytest.raises(ValueError, match=r"latents of 96 \+ -16 values"):
        cpu.mla_attention(q, pages, 1, layout, targets=mla, **{**options, "latent_size": 96})
    with pytest.raises(ValueError, match="no query heads"):
        cpu.mla_attention(q[:, :0], pages, 1, layout, targets=mla, **options)
    with pytest.raises(NotRegistered, match="attend_float32 is not registered"):
        cpu.mla_attention(q, pages, 1, layout, targets=Targets(level="generic", names={}), **options)


@pytest.mark.parametrize(
    ("starts", "message"),
    [
        ([0, 2, 1, 3, 7, 7, 7], r"query_starts must ascend .*; \[2\] = 1, T = 75"),
        ([0, 1, 2, 3, 76, 76, 76], r"query_starts must ascend .*; \[4\] = 76, T = 75"),
        ([-1, 1, 2, 3, 7, 7, 7], r"query_starts must ascend .*; \[0\] = -1, T = 75"),
        ([0, 1, 2, 3], "are of 6, 3 and 6 sequences"),
    ],
)
def test_the_machine_code_refuses_layouts(mla, starts, message):
    q, pages, layout, options = inputs_of(case_named("mixed"), "float32")
    bad = dataclasses.replace(layout)
    object.__setattr__(bad, "query_starts", jnp.asarray(starts, jnp.int32))
    with pytest.raises(REFUSED, match=f"mla_attention float32: .*{message}"):
        jax.block_until_ready(cpu.mla_attention(q, pages, 1, bad, targets=mla, **options))
    with pytest.raises(REFUSED, match=f"write_latent float32: .*{message}"):
        jax.block_until_ready(cpu.write_latent(q[:, 0], pages, 1, bad, targets=mla))


@pytest.mark.parametrize("layer", [-1, 2])
def test_the_machine_code_refuses_layers(mla, layer):
    q, pages, layout, options = inputs_of(case_named("mixed"), "bfloat16")
    with pytest.raises(REFUSED, match=f"mla_attention bfloat16: layer {layer} of 2"):
        jax.block_until_ready(cpu.mla_attention(q, pages, layer, layout, targets=mla, **options))
    with pytest.raises(REFUSED, match=f"write_latent bfloat16: layer {layer} of 2"):
        jax.block_until_ready(cpu.write_latent(q[:, 0], pages, layer, layout, targets=mla))


@pytest.mark.parametrize("dtype", DTYPES)
def test_self_test_is_small(mla, dtype):
    assert cpu.self_test(mla, dtype) < 1e-5


def test_self_test_sees_a_wrong_kernel(mla, monkeypatch):
    attend = cpu.mla_attention
    monkeypatch.setattr(cpu, "mla_attention", lambda *a, **k: attend(*a, **k) * 1.001)
    assert cpu.self_test(mla, "float32") > 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("level", [level.name for level in LEVELS[1:]])
def test_lesser_cpus(kernel_cache, level):
    """The other lowerings of each operation."""
    try:
        level_named(level)
    except ValueError as error:
        pytest.skip(str(error))
    targets = register(cpu.all_functions(), cache_dir=kernel_cache, level=level)
    for dtype in DTYPES:
        assert cpu.self_test(targets, dtype) < 1e-5
        for case in ALL_CASES:
            if not case.is_large:
                test_matches_the_reference(targets, case, dtype)
