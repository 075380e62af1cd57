"""The XLA path against the definition, the definition against plain numpy, and what wrong page numbers may do."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.kernels import REFERENCE, XLA
from pallas_kernels.kv_pages import KVPages
from pallas_kernels.paged_attention.cases import CASES, Case
from pallas_kernels.ragged import RaggedLayout

TOLERANCE = 2e-5  # float32, sums of up to 300 terms in another order


def build(case: Case, seed: int = 0, pad_rows: int = 2, pad_tokens: int = 3):
    """Random cache, queries and layout of a case, with padding single rows, padding rows and padding tokens."""
    rng = np.random.default_rng(seed)
    singles = [r for r in case.rows if r[0] == 1]
    chunks = [r for r in case.rows if r[0] > 1]
    rows = singles + [(1, 0)] * pad_rows + chunks + [(0, 0)] * pad_rows
    pages_per_row = max(-(-kv // case.page_size) for _, kv in case.rows) + 1
    num_pages = sum(-(-kv // case.page_size) for _, kv in rows) + 3
    free = rng.permutation(num_pages)
    table = np.full((len(rows), pages_per_row), num_pages + 7, np.int32)
    for i, (_, kv) in enumerate(rows):
        need = -(-kv // case.page_size)
        table[i, :need], free = free[:need], free[need:]
    starts = np.concatenate([[0], np.cumsum([n for n, _ in rows])]).astype(np.int32)
    layout = RaggedLayout(
        query_starts=jnp.asarray(starts),
        kv_lengths=jnp.asarray([kv for _, kv in rows], jnp.int32),
        page_table=jnp.asarray(table),
        num_single_rows=len(singles) + pad_rows,
    )
    tokens = int(starts[-1]) + (pad_tokens if chunks else 0)
    q = rng.standard_normal((tokens, case.num_heads, case.head_size), np.float32)
    cache = rng.standard_normal((2, 2, num_pages, case.page_size, case.num_kv_heads, case.head_size), np.float32)
    sinks = jnp.asarray(rng.standard_normal(case.num_heads, np.float32)) if case.sinks else None
    options = {"scale": case.head_size**-0.5, "window": case.window, "soft_cap": case.soft_cap, "sinks": sinks}
    pages = KVPages(k=jnp.asarray(cache[0]), v=jnp.asarray(cache[1]))
    return jnp.asarray(q), pages, layout, rows, options


def plain_numpy(q, pages, layout, rows, options):
    """One token and one head at a time."""
    q, k_pages, v_pages, table = (np.asarray(a, np.float64) for a in (q, pages.k, pages.v, layout.page_table))
    out = np.zeros(q.shape)
    group = q.shape[1] // k_pages.shape[3]
    token = 0
    for row, (length, kv) in enumerate(rows):
        for j in range(length):
            if kv:
                position = kv - length + j
                low = 0 if options["window"] is None else max(0, position - options["window"] + 1)
                size = k_pages.shape[2]
                where = [(int(table[row, p // size]), p % size) for p in range(low, position + 1)]
                for head in range(q.shape[1]):
                    k = np.stack([k_pages[1, page, at, head // group] for page, at in where])
                    v = np.stack([v_pages[1, page, at, head // group] for page, at in where])
                    logits = options["scale"] * k @ q[token, head]
                    if options["soft_cap"]:
                        logits = options["soft_cap"] * np.tanh(logits / options["soft_cap"])
                    if options["sinks"] is not None:
                        logits = np.append(logits, float(options["sinks"][head]))
                        v = np.concatenate([v, np.zeros((1, v.shape[1]))])
                    weights = np.exp(logits - logits.max())
                    out[token, head] = weights @ v / weights.sum()
            token += 1
    return out


@pytest.mark.parametrize("kernels", [REFERENCE, XLA], ids=lambda k: k.name)
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_matches_plain_numpy(case, kernels):
    q, pages, layout, rows, options = build(case)
    got = jax.jit(lambda q, pages, layout: kernels.paged_attention(q, pages, 1, layout, **options))(q, pages, layout)
    np.testing.assert_allclose(got, plain_numpy(q, pages, layout, rows, options), atol=TOLERANCE)


def test_rows_do_not_depend_on_neighbours_bitwise():
    case = next(c for c in CASES if c.name == "mixed")
    q, pages, layout, _rows, options = build(case)
    f = jax.jit(lambda q, layout: XLA.paged_attention(q, pages, 1, layout, **options))
    whole = np.asarray(f(q, layout))
    longest = dataclasses.replace(layout, kv_lengths=layout.kv_lengths.at[0].set(1))
    changed = np.asarray(f(q, longest))
    assert (whole[1:] == changed[1:]).all()
    assert not (whole[0] == changed[0]).all()


@pytest.mark.parametrize("kernels", [REFERENCE, XLA], ids=lambda k: k.name)
def test_wrong_page_numbers_touch_no_page(kernels):
    """The canary: whatever stands in the table, a write reaches only pages inside the cache named by the row."""
    canary = jnp.full((1, 4, 16, 2, 8), 7.0)
    heads = {"num_kv_heads": 2, "head_size": 8}
    for bad in (-1, 4, 5, 2**31 - 1, -(2**31)):
        layout = RaggedLayout(
            query_starts=jnp.asarray([0, 1, 2, 3], jnp.int32),
            kv_lengths=jnp.asarray([1, 40, 0], jnp.int32),
            page_table=jnp.asarray([[bad, 0], [bad, 1], [2, 3]], jnp.int32),
            num_single_rows=3,
        )
        q, pages = kernels.rope_write_kv(jnp.ones((3, 48)), KVPages(k=canary, v=canary), 0, layout, **heads)
        assert (pages.k == 7.0).all()
        assert (pages.v == 7.0).all()
        out = kernels.paged_attention(q, pages, 0, layout, scale=1.0)
        assert (out[0] == 0).all()
        assert (out[2] == 0).all()


def test_a_write_lands_where_attention_reads():
    layout = RaggedLayout(
        query_starts=jnp.asarray([0, 3], jnp.int32),
        kv_lengths=jnp.asarray([18], jnp.int32),
        page_table=jnp.asarray([[2, 1]], jnp.int32),
        num_single_rows=0,
    )
    pages = XLA.new_pages(num_layers=1, num_pages=3, page_size=16, num_kv_heads=1, head_size=4, dtype="float32")
    qkv = jnp.arange(36.0).reshape(3, 12) + 1
    q, pages = XLA.rope_write_kv(qkv, pages, 0, layout, num_kv_heads=1, head_size=4)
    keys, values = qkv[:, 4:8], qkv[:, 8:]
    assert (q[:, 0] == qkv[:, :4]).all()
    for written, new in ((pages.k, keys), (pages.v, values)):
        assert (written[0, 2, 15, 0] == new[0]).all()
        assert (written[0, 1, :2, 0] == new[1:]).all()
        assert float(jnp.abs(written).sum()) == float(new.sum())


def test_int8_pages_hold_each_head_to_half_a_step():
    """And both ways of attending read the same numbers from them."""
    case = next(c for c in CASES if c.name == "mixed")
    q, _, layout, rows, options = build(case)
    rng = np.random.default_rng(3)
    heads = {"num_kv_heads": case.num_kv_heads, "head_size": case.head_size}
    columns = (case.num_heads + 2 * case.num_kv_heads) * case.head_size
    whole = dataclasses.replace(
        layout, query_starts=jnp.asarray([0, *np.cumsum([kv for _, kv in rows])], jnp.int32), num_single_rows=0
    )
    qkv = jnp.asarray(rng.standard_normal((sum(kv for _, kv in rows), columns), np.float32)).at[4].set(0)
    size = {"num_layers": 2, "num_pages": 30, "page_size": case.page_size}
    exact, rounded = (
        XLA.rope_write_kv(qkv, XLA.new_pages(**size, **heads, dtype=dtype), 1, whole, **heads)[1]
        for dtype in ("float32", "int8")
    )
    k, v = (x * scale[..., None] for x, scale in ((rounded.k, rounded.k_scale), (rounded.v, rounded.v_scale)))
    for got, want in ((k, exact.k), (v, exact.v)):
        step = jnp.abs(want).max(axis=-1, keepdims=True) / 127
        assert (jnp.abs(got - want) <= 0.501 * step).all()
        assert (jnp.abs(got - want) > 0.4 * step).any()
    for kernels in (REFERENCE, XLA):
        got = kernels.paged_attention(q, rounded, 1, layout, **options)
        numbers = KVPages(k=k, v=v)
        np.testing.assert_allclose(got, plain_numpy(q, numbers, layout, rows, options), atol=TOLERANCE)


@pytest.mark.parametrize("kernels", [REFERENCE, XLA], ids=lambda k: k.name)
def test_page_numbers_before_the_window_count_for_nothing(kernels):
    """Not in one bit: -1 stands where a page was given back, and another's page would do no harm either."""
    case = Case(name="window", num_heads=4, num_kv_heads=2, head_size=16, page_size=16, window=20,
                rows=((1, 150), (1, 3), (1, 37), (40, 190), (2, 300)))  # fmt: skip
    q, pages, layout, rows, options = build(case)
    f = jax.jit(lambda q, pages, layout: kernels.paged_attention(q, pages, 1, layout, **options))
    whole = f(q, pages, layout)
    assert case.window is not None
    firsts = [max(0, kv - length + 1 - case.window) // case.page_size for length, kv in rows]
    for number in (-1, 0, pages.k.shape[1], 2**31 - 1):
        table = np.array(layout.page_table)
        for row, first in enumerate(firsts):
            table[row, :first] = number
        got = f(q, pages, dataclasses.replace(layout, page_table=jnp.asarray(table)))
        np.testing.assert_array_equal(got, whole)
    assert firsts[0] == 8
    table[0, 8] = -1  # seen in part
    assert not np.array_equal(f(q, pages, dataclasses.replace(layout, page_table=jnp.asarray(table))), whole)
