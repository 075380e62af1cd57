"""Kernels against their definitions on this machine's device, with made-up numbers in the shapes of real models."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.quant.formats import FORMATS
from pallas_kernels.kernels import REFERENCE, Kernels
from pallas_kernels.paged_attention.cases import CASES, Case
from pallas_kernels.ragged import RaggedLayout

ATTENTION_TOLERANCE = 2e-5  # float32, averages of values near 1 that are summed in another order
MATMUL_TOLERANCE = 2e-4  # float32, sums of 256 products that reach about 60
NUM_LAYERS = 2


def attention_errors(kernels: Kernels) -> dict[str, float]:
    """Largest absolute difference between `kernels` and the reference, by case; NaN where a result is not finite."""
    with jax.default_matmul_precision("highest"):  # an accelerator's default rounds more than the tolerance
        return {case.name: _attention_error(kernels, case) for case in CASES}


def _attention_error(kernels: Kernels, case: Case) -> float:
    """Writes the newest keys and values of a case and attends to all of them, in both implementations."""
    rng = np.random.default_rng(0)
    layout, num_tokens, num_pages = _layout(case, rng)

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape, np.float32))

    cache = (NUM_LAYERS, num_pages, case.page_size, case.num_kv_heads, case.head_size)
    new = (num_tokens, case.num_kv_heads, case.head_size)
    arrays = (
        normal(num_tokens, case.num_heads, case.head_size),
        normal(*cache),
        normal(*cache),
        normal(*new),
        normal(*new),
    )
    sinks = normal(case.num_heads) if case.sinks else None

    def attend(ops: Kernels) -> Callable[..., jax.Array]:
        def run(q: jax.Array, k: jax.Array, v: jax.Array, k_new: jax.Array, v_new: jax.Array) -> jax.Array:
            k, v = ops.write_kv(k, v, 1, k_new, v_new, layout)
            options = {"window": case.window, "soft_cap": case.soft_cap, "sinks": sinks}
            return ops.paged_attention(q, k, v, 1, layout, scale=case.head_size**-0.5, **options)

        return run

    return _largest_difference(jax.jit(attend(kernels))(*arrays), jax.jit(attend(REFERENCE))(*arrays))


def _layout(case: Case, rng: np.random.Generator) -> tuple[RaggedLayout, int, int]:
    """The rows of a case on shuffled pages: rows with one token first, as the layout demands."""
    rows = sorted(case.rows, key=lambda row: row[0] > 1)
    needs = [-(-kv_length // case.page_size) for _, kv_length in rows]
    pages = rng.permutation(sum(needs))
    table = np.zeros((len(rows), max(needs)), np.int32)
    for row, need in enumerate(needs):
        table[row, :need], pages = pages[:need], pages[need:]
    starts = np.cumsum([0, *(length for length, _ in rows)])
    layout = RaggedLayout(
        query_starts=jnp.asarray(starts, jnp.int32),
        kv_lengths=jnp.asarray([kv_length for _, kv_length in rows], jnp.int32),
        page_table=jnp.asarray(table),
        num_single_rows=sum(length == 1 for length, _ in rows),
    )
    return layout, int(starts[-1]), sum(needs)


def matmul_errors(kernels: Kernels) -> dict[str, float]:
    """Largest absolute difference between the product with a packed weight and numpy's, by format."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((4, 256), np.float32)
    matrix = rng.standard_normal((64, 256), np.float32)
    errors = {}
    for name, weight_format in FORMATS.items():
        weight = weight_format.encode(matrix)
        expected = x.astype(np.float64) @ np.asarray(weight.decode(), np.float64).T
        errors[name] = _largest_difference(jax.jit(kernels.quantized_matmul)(jnp.asarray(x), weight), expected)
    return errors


def _largest_difference(got: object, expected: object) -> float:
    return float(np.max(np.abs(np.asarray(got, np.float64) - np.asarray(expected, np.float64))))
