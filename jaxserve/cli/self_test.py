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
    """Fills a cache and attends to it in both implementations, each with its own layout of pages."""
    rng = np.random.default_rng(0)
    rows = sorted(case.rows, key=lambda row: row[0] > 1)  # rows with one token first, as a layout demands
    table, num_pages = _shuffled_pages(case, rows, rng)
    before = _layout([(kv_length - length, kv_length - length) for length, kv_length in rows], table, num_singles=0)
    now = _layout(rows, table, num_singles=sum(length == 1 for length, _ in rows))
    columns = (case.num_heads + 2 * case.num_kv_heads) * case.head_size
    old, new = (
        jnp.asarray(rng.standard_normal((int(layout.query_starts[-1]), columns), np.float32))
        for layout in (before, now)
    )
    heads = {"num_kv_heads": case.num_kv_heads, "head_size": case.head_size}
    sinks = jnp.asarray(rng.standard_normal(case.num_heads), jnp.float32) if case.sinks else None
    options = {"scale": case.head_size**-0.5, "window": case.window, "soft_cap": case.soft_cap, "sinks": sinks}

    def attend(ops: Kernels) -> Callable[..., jax.Array]:
        def run(old: jax.Array, new: jax.Array) -> jax.Array:
            pages = ops.new_pages(
                num_layers=NUM_LAYERS, num_pages=num_pages, page_size=case.page_size, dtype="float32", **heads
            )
            if old.shape[0]:
                _, pages = ops.rope_write_kv(old, pages, 1, before, **heads)
            q, pages = ops.rope_write_kv(new, pages, 1, now, **heads)
            return ops.paged_attention(q, pages, 1, now, **options)

        return run

    return _largest_difference(jax.jit(attend(kernels))(old, new), jax.jit(attend(REFERENCE))(old, new))


def _shuffled_pages(case: Case, rows: list[tuple[int, int]], rng: np.random.Generator) -> tuple[np.ndarray, int]:
    """A page table for the rows, and the number of pages."""
    needs = [-(-kv_length // case.page_size) for _, kv_length in rows]
    pages = rng.permutation(sum(needs))
    table = np.zeros((len(rows), max(needs)), np.int32)
    for row, need in enumerate(needs):
        table[row, :need], pages = pages[:need], pages[need:]
    return table, sum(needs)


def _layout(rows: list[tuple[int, int]], table: np.ndarray, *, num_singles: int) -> RaggedLayout:
    return RaggedLayout(
        query_starts=jnp.asarray(np.cumsum([0, *(length for length, _ in rows)]), jnp.int32),
        kv_lengths=jnp.asarray([kv_length for _, kv_length in rows], jnp.int32),
        page_table=jnp.asarray(table),
        num_single_rows=num_singles,
    )


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
