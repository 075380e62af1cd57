"""Operations counted from jaxprs, against what the shapes say."""

import jax
import jax.numpy as jnp
from jax import lax

from sharding.flops import matmul_flops

X, W = jnp.zeros((4, 8)), jnp.zeros((8, 8))
ONCE = 2 * 4 * 8 * 8


def count(function, *arguments, trips=lambda holds_loop, depth: 0.0, ragged_rows=lambda rows, groups: rows):
    return matmul_flops(jax.make_jaxpr(function)(*arguments).jaxpr, trips=trips, ragged_rows=ragged_rows)


def test_a_product_and_a_batched_one():
    assert count(lambda x, w: x @ w, X, W) == ONCE
    assert count(lambda x, w: jnp.einsum("bij,bjk->bik", x, w), jnp.zeros((3, 4, 8)), jnp.zeros((3, 8, 8))) == 3 * ONCE


def test_a_scan_counts_as_often_as_it_is_long_and_jit_counts_what_it_holds():
    assert count(lambda x, w: lax.scan(lambda c, _: (c @ w, None), x, None, length=61)[0], X, W) == 61 * ONCE
    assert count(jax.jit(lambda x, w: x @ w), X, W) == ONCE


def test_of_a_branch_the_cheapest_counts():
    assert count(lambda x, w: lax.cond(x[0, 0] > 0, lambda: x @ w @ w, lambda: x @ w), X, W) == ONCE
    assert count(lambda x, w: lax.cond(x[0, 0] > 0, lambda: x @ w, lambda: x), X, W) == 0


def test_open_loops_are_told_apart_by_what_they_hold_and_where_they_stand():
    def both(x, w, n):
        x = lax.fori_loop(0, n, lambda i, c: c @ w, x)
        return lax.fori_loop(0, n, lambda i, c: lax.fori_loop(0, n, lambda j, d: d @ w, c), x)

    def trips(holds_loop, depth):
        return {(False, 0): 100, (True, 0): 10, (False, 1): 3}[holds_loop, depth]

    assert count(both, X, W, jnp.int32(2), trips=trips) == (100 + 10 * 3) * ONCE


def test_a_ragged_product_counts_the_rows_it_is_told():
    groups = jnp.zeros((5, 8, 8))
    sizes = jnp.zeros(5, jnp.int32)
    assert count(lambda x: lax.ragged_dot(x, groups, sizes), X) == ONCE
    assert count(lambda x: lax.ragged_dot(x, groups, sizes), X, ragged_rows=lambda r, g: r * g) == 5 * ONCE
