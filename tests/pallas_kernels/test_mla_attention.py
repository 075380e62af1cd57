"""MLA: the definition against plain numpy, the XLA path against the definition, and what wrong page numbers may do."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.mla_attention import reference, xla
from pallas_kernels.mla_attention.cases import CASES, Case, inputs_of
from pallas_kernels.mla_attention.latent_pages import LatentPages
from pallas_kernels.ragged import RaggedLayout

TOLERANCE = 2e-5  # float32, sums of up to 1400 terms in another order
PARAMS = [pytest.param(c, id=c.name, marks=[pytest.mark.slow] if c.is_large else []) for c in CASES]


def case_named(name: str) -> Case:
    return next(case for case in CASES if case.name == name)


def plain_numpy(q, pages, layout, *, scale, latent_size):
    """One token at a time, in float64."""
    q, latent, table = (np.asarray(a, np.float64) for a in (q, pages.latent[1].astype(jnp.float32), layout.page_table))
    starts, lengths = np.asarray(layout.query_starts), np.asarray(layout.kv_lengths)
    out, size = np.zeros((*q.shape[:2], latent_size)), latent.shape[1]
    for row, length in enumerate(lengths):
        for token in range(starts[row], starts[row + 1] if length else starts[row]):
            position = length - (starts[row + 1] - token)
            keys = np.stack([latent[int(table[row, p // size]), p % size] for p in range(position + 1)])
            logits = scale * q[token] @ keys.T
            weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
            out[token] = weights @ keys[:, :latent_size] / weights.sum(axis=-1, keepdims=True)
    return out


@pytest.mark.parametrize("op", [reference, xla], ids=["reference", "xla"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", PARAMS)
def test_matches_plain_numpy(case, dtype, op):
    q, pages, layout, options = inputs_of(case, dtype)
    got = jax.jit(lambda q, pages, layout: op.mla_attention(q, pages, 1, layout, **options))(q, pages, layout)
    np.testing.assert_allclose(got, plain_numpy(q, pages, layout, **options), atol=TOLERANCE)


@pytest.mark.parametrize("op", [reference, xla], ids=["reference", "xla"])
def test_longer_rows_of_a_cache_change_nothing(op):
    case = case_named("odd-heads")
    q, pages, layout, options = inputs_of(case, "float32")
    latent = jax.random.normal(jax.random.key(3), (q.shape[0], q.shape[2]))
    longer = LatentPages(latent=jnp.pad(pages.latent, ((0, 0), (0, 0), (0, 0), (0, 11)), constant_values=7.0))
    written = [op.write_latent(latent, each, 1, layout) for each in (pages, longer)]
    np.testing.assert_array_equal(written[1].latent[..., :-11], written[0].latent)
    want, got = (op.mla_attention(q, each, 1, layout, **options) for each in written)
    np.testing.assert_allclose(got, want, atol=TOLERANCE)


def test_is_attention_with_the_projections_unabsorbed():
    """Keys and values of each head made from the latents, as section 2.1 of the paper writes it before absorbing."""
    case = dataclasses.replace(case_named("odd-heads"), rows=((6, 6),))
    _, pages, layout, options = inputs_of(case, "float32")
    rng = np.random.default_rng(1)
    heads, latent_size, rope_size, size = case.num_heads, case.latent_size, case.rope_size, 24
    up_key, up_value = rng.standard_normal((2, heads, latent_size, size), np.float32) / 8
    q_nope = rng.standard_normal((6, heads, size), np.float32)
    q_rope = rng.standard_normal((6, heads, rope_size), np.float32)
    kept = np.asarray(pages.latent[1, int(layout.page_table[1, 0]), :6])
    c, k_rope = kept[:, :latent_size], kept[:, latent_size:]
    logits = np.einsum("tnh,sc,nch->nts", q_nope, c, up_key) + np.einsum("tnr,sr->nts", q_rope, k_rope)
    weights = np.exp(np.where(np.tri(6, dtype=bool), 0.1 * logits, -np.inf))
    weights /= weights.sum(axis=-1, keepdims=True)
    want = np.einsum("nts,sc,nch->tnh", weights, c, up_value)
    q = np.concatenate([np.einsum("tnh,nch->tnc", q_nope, up_key), q_rope], axis=-1)
    q = jnp.asarray(np.concatenate([np.zeros_like(q[:1]), q]))  # token 0 is the padding row's
    out = reference.mla_attention(q, pages, 1, layout, scale=0.1, latent_size=options["latent_size"])
    np.testing.assert_allclose(np.einsum("tnc,nch->tnh", out[1:], up_value), want, atol=1e-4)


@pytest.mark.parametrize("op", [reference, xla], ids=["reference", "xla"])
def test_wrong_page_numbers_touch_no_page(op):
    canary = LatentPages(latent=jnp.full((1, 4, 16, 32), 7.0))
    for bad in (-1, 4, 5, 2**31 - 1, -(2**31)):
        layout = RaggedLayout(
            query_starts=jnp.asarray([0, 1, 2, 3], jnp.int32),
            kv_lengths=jnp.asarray([1, 40, 0], jnp.int32),
            page_table=jnp.asarray([[bad, 0], [bad, 1], [2, 3]], jnp.int32),
            num_single_rows=3,
        )
        pages = op.write_latent(jnp.ones((3, 32)), canary, 0, layout)
        assert (pages.latent == 7.0).all()
        out = op.mla_attention(jnp.ones((3, 2, 32)), pages, 0, layout, scale=1.0, latent_size=16)
        assert (out[0] == 0).all()
        assert (out[2] == 0).all()


def test_a_write_lands_where_attention_reads():
    layout = RaggedLayout(
        query_starts=jnp.asarray([0, 3], jnp.int32),
        kv_lengths=jnp.asarray([18], jnp.int32),
        page_table=jnp.asarray([[2, 1]], jnp.int32),
        num_single_rows=0,
    )
    pages = reference.new_pages(num_layers=1, num_pages=3, page_size=16, latent_size=4, rope_size=2, dtype="bfloat16")
    latent = jnp.arange(18.0).reshape(3, 6) + 1
    written = reference.write_latent(latent, pages, 0, layout).latent
    assert (written[0, 2, 15] == latent[0]).all()
    assert (written[0, 1, :2] == latent[1:]).all()
    assert float(jnp.abs(written.astype(jnp.float32)).sum()) == float(latent.sum())


def test_refuses_a_type():
    with pytest.raises(ValueError, match="latents are kept as float32 or bfloat16, not int8"):
        reference.new_pages(num_layers=1, num_pages=3, page_size=16, latent_size=4, rope_size=2, dtype="int8")
