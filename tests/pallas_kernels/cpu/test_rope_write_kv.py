"""Heads split, normed, rotated and written into pages in place, on CPUs."""

import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.cpu.targets import register
from pallas_kernels.kv_pages import KVPages
from pallas_kernels.paged_attention import cpu, reference
from pallas_kernels.ragged import RaggedLayout

DTYPES = ["float32", "bfloat16", "int8"]
N, K, H, L = 6, 2, 48, 32
# Two decode rows, a padding row, a chunk over three pages, a padding row; three tokens of padding behind them.
LAYOUT = RaggedLayout(
    kv_lengths=jnp.asarray([33, 1, 0, 75, 0], jnp.int32),
    query_starts=jnp.asarray([0, 1, 2, 3, 73, 73], jnp.int32),
    page_table=jnp.asarray([[3, 1, 99], [4, 99, 99], [99, 99, 99], [0, 6, 2], [99, 99, 99]], jnp.int32),
    num_single_rows=3,
)
NUM_TOKENS, NUM_PAGES = 76, 8


@pytest.fixture(scope="module")
def write(kernel_cache):
    targets = register([cpu.functions_of(dtype)[1] for dtype in DTYPES], cache_dir=kernel_cache)

    def call(qkv, pages, layout=LAYOUT, **options):
        return cpu.rope_write_kv(qkv, pages, 1, layout, num_kv_heads=K, head_size=H, targets=targets, **options)

    return call


def _new_pages(dtype: str, num_layers: int = 2) -> KVPages:
    return cpu.new_pages(
        num_layers=num_layers, num_pages=NUM_PAGES, page_size=L, num_kv_heads=K, head_size=H, dtype=dtype
    )


def _qkv(num_tokens: int = NUM_TOKENS) -> jax.Array:
    return jnp.asarray(np.random.default_rng(0).standard_normal((num_tokens, (N + 2 * K) * H), np.float32))


def _options(num_pairs: int, norms: bool) -> dict[str, Any]:
    rng = np.random.default_rng(1)
    turns = rng.uniform(0, 100, (NUM_TOKENS, num_pairs)).astype(np.float32)
    options: dict[str, Any] = {"angles": (jnp.cos(turns), jnp.sin(turns)) if num_pairs else None}
    if norms:
        q_norm, k_norm = jnp.asarray(rng.uniform(0.5, 2, (2, H)).astype(np.float32))
        options |= {"q_norm": q_norm, "k_norm": k_norm, "eps": 1e-3}
    return options


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize("num_pairs", [0, 3, 16, 24])
def test_matches_the_reference(write, num_pairs, norms, dtype):
    options, qkv = _options(num_pairs, norms), _qkv()
    empty = jnp.zeros((2, NUM_PAGES, L, K, H))
    want_q, want = reference.rope_write_kv(
        qkv, KVPages(k=empty, v=empty), 1, LAYOUT, num_kv_heads=K, head_size=H, **options
    )
    q, pages = write(qkv, _new_pages(dtype), **options)
    # float32: sums of 48 squares and of two products, rounded in another order
    np.testing.assert_allclose(q[:73], want_q[:73], atol=2e-6)
    assert np.isfinite(q).all()
    rounding = {"float32": 0, "bfloat16": 2.0**-8, "int8": 0.501 / 127}[dtype]
    for got, exact in zip(cpu.decode_pages(pages), (want.k, want.v), strict=True):
        largest = jnp.abs(exact).max(axis=-1, keepdims=True) if dtype == "int8" else jnp.abs(exact)
        assert (jnp.abs(got - exact) <= rounding * largest + 4e-6).all()


def test_values_are_rounded_to_the_nearest(write):
    qkv = _qkv()
    _, pages = write(qkv, _new_pages("bfloat16"))
    token = qkv[0, -K * H :].reshape(K, H)
    np.testing.assert_array_equal(pages.v[1, 1, :, 0], token.astype(jnp.bfloat16))
    _, pages = write(qkv, _new_pages("int8"))
    scale = jnp.abs(token).max(axis=-1) / 127
    np.testing.assert_allclose(pages.v_scale[1, 1, :, 0], scale, rtol=1e-6)
    np.testing.assert_array_equal(pages.v[1, 1, :, 0], jnp.rint(token / scale[:, None]).astype(jnp.int8))


@pytest.mark.parametrize("dtype", DTYPES)
def test_nothing_else_is_written(write, dtype):
    """Not for padding, not for page numbers outside the cache."""
    old = jax.tree.map(lambda a: jnp.full_like(a, 7), _new_pages(dtype))
    for bad in (-1, NUM_PAGES, 2**31 - 1, -(2**31)):
        layout = dataclasses.replace(LAYOUT, page_table=LAYOUT.page_table.at[3, 1].set(bad))
        _, pages = write(_qkv(), old, layout)
        k, v = cpu.decode_pages(pages)
        untouched = np.ones((2, NUM_PAGES, L), bool)
        untouched[1, 1, 0] = untouched[1, 4, 0] = untouched[1, 0, 5:] = untouched[1, 2, :11] = False
        old_value = 49.0 if dtype == "int8" else 7.0
        for got in (k, v):
            assert (np.asarray(got)[untouched] == old_value).all()
            assert (np.asarray(got)[~untouched] != old_value).mean() > 0.9


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_token_does_not_depend_on_its_batch(write, dtype):
    options, qkv = _options(24, True), _qkv()
    q, pages = write(qkv, _new_pages(dtype), **options)
    one_by_one = _new_pages(dtype)
    cos, sin = options.pop("angles")
    for token in range(3, 73):
        layout = RaggedLayout(
            kv_lengths=jnp.asarray([token + 3], jnp.int32),
            query_starts=jnp.asarray([0, 1], jnp.int32),
            page_table=LAYOUT.page_table[3:4],
            num_single_rows=1,
        )
        here = slice(token, token + 1)
        one, one_by_one = write(qkv[here], one_by_one, layout, angles=(cos[here], sin[here]), **options)
        np.testing.assert_array_equal(one, q[here])
    for page in (0, 6, 2):
        for got, want in zip(jax.tree.leaves(one_by_one), jax.tree.leaves(pages), strict=True):
            np.testing.assert_array_equal(got[1, page], want[1, page])


def test_tokens_are_shared_out_to_threads_alike(write):
    """Enough of them for that."""
    qkv = jnp.tile(_qkv(1), (640, 1))
    layout = RaggedLayout(
        kv_lengths=jnp.asarray([640], jnp.int32),
        query_starts=jnp.asarray([0, 640], jnp.int32),
        page_table=jnp.arange(20, dtype=jnp.int32)[None],
        num_single_rows=0,
    )
    pages = cpu.new_pages(num_layers=2, num_pages=20, page_size=L, num_kv_heads=K, head_size=H, dtype="float32")
    q, pages = write(qkv, pages, layout)
    k, v = (np.asarray(a)[1].reshape(640, -1) for a in cpu.decode_pages(pages))
    for got, want in ((q.reshape(640, -1), qkv[0, : N * H]), (k, qkv[0, N * H : -K * H]), (v, qkv[0, -K * H :])):
        np.testing.assert_array_equal(got, np.tile(want, (640, 1)))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_value_that_is_no_number_is_kept(write, bad):
    qkv = _qkv().at[0, -1].set(bad)
    for dtype in DTYPES:
        _, pages = write(qkv, _new_pages(dtype))
        v = np.asarray(cpu.decode_pages(pages)[1])
        assert not np.isfinite(v[1, 1, 0, -1, -1])
        assert np.isfinite(v[1, 1, 0, 0]).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_cache_is_updated_in_place(attention_targets, dtype):
    """A copy of it in any layer would cost more than the whole step."""
    layers = 6

    def step(pages, qkv):
        for layer in range(layers):
            q, pages = cpu.rope_write_kv(
                qkv, pages, layer, LAYOUT, num_kv_heads=K, head_size=H, targets=attention_targets
            )
            out = cpu.paged_attention(q, pages, layer, LAYOUT, scale=1.0, targets=attention_targets)
            qkv = qkv.at[:, : N * H].add(out.reshape(NUM_TOKENS, -1))
        return pages, qkv

    pages = _new_pages(dtype, layers)
    compiled = jax.jit(step, donate_argnums=0).lower(pages, _qkv()).compile()
    shapes = {",".join(map(str, array.shape)) for array in jax.tree.leaves(pages)}
    copies = re.findall(r"= \w+\[([\d,]+)\][^ ]* copy\(", compiled.as_text() or "")
    assert not shapes & set(copies)
    addresses = [array.unsafe_buffer_pointer() for array in jax.tree.leaves(pages)]
    pages, _ = compiled(pages, _qkv())
    assert [array.unsafe_buffer_pointer() for array in jax.tree.leaves(pages)] == addresses


@pytest.fixture(scope="module")
def attention_targets(kernel_cache):
    return register([f for dtype in DTYPES for f in cpu.functions_of(dtype)], cache_dir=kernel_cache)


@pytest.mark.parametrize(
    ("columns", "options", "message"),
    [
        (8 * H, {}, None),
        (4 * H, {}, "192 columns are no N"),
        (9 * H + 1, {}, "433 columns are no N"),
        (9 * H, {"angles": (jnp.ones((76, 25)), jnp.ones((76, 25)))}, "for 76 tokens of head size 48"),
    ],
)
def test_refuses_shapes(write, columns, options, message):
    qkv = jnp.zeros((NUM_TOKENS, columns))
    if message is None:
        assert write(qkv, _new_pages("float32"), **options)[0].shape == (NUM_TOKENS, 4, H)
        return
    with pytest.raises(ValueError, match=message):
        write(qkv, _new_pages("float32"), **options)
