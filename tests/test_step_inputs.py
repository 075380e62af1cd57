"""What is packed on the host is what the step unpacks, for every bucket and every bit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.layer_groups import LayerGroups
from jaxserve.step_inputs import FLOAT_COLUMNS, INT_COLUMNS, StepShape, buffer_views, packing, unpack

GROUPS = LayerGroups(
    layers_per_group=2,
    num_full=2,
    num_windowed=3,
    places=((2, 0), (0, 0)),
    window=5,
    window_pages=3,
    page_size=4,
)
SHAPES = st.builds(
    StepShape,
    single_rows=st.integers(1, 5),
    chunk_tokens=st.integers(0, 6),
    chunk_rows=st.integers(0, 3),
    max_pages=st.integers(1, 4),
    groups=st.sampled_from([None, GROUPS]),
)


@given(shape=SHAPES)
def test_fields_cover_the_buffer_without_overlap(shape):
    fields, length = packing(shape)
    ends = 0
    for field in fields:
        assert field.offset == ends
        ends += field.size
    assert ends == length
    buffer, views = buffer_views(shape)
    for view in views.values():
        view[...] += 1
    assert buffer.tolist() == [1] * length


@pytest.mark.parametrize(
    "shape",
    [
        StepShape(single_rows=3, chunk_tokens=0, chunk_rows=0, max_pages=2),
        StepShape(single_rows=2, chunk_tokens=7, chunk_rows=2, max_pages=3),
    ],
    ids=str,
)
def test_round_trip(shape):
    rng = np.random.default_rng(0)
    buffer, views = buffer_views(shape)
    for view in views.values():
        view[...] = rng.integers(-(2**31), 2**31, view.shape)
    floats = rng.normal(size=(shape.num_rows, len(FLOAT_COLUMNS))).astype(np.float32)
    views["sampling"][:, : len(FLOAT_COLUMNS)] = floats.view(np.int32)
    views["kv_lengths"][:] = 10
    views["sampling"][:, len(FLOAT_COLUMNS) + INT_COLUMNS.index("num_prompt_tokens")] = 7
    views["sampling"][:, len(FLOAT_COLUMNS) + INT_COLUMNS.index("min_tokens")] = 2 + np.arange(shape.num_rows)
    inputs = jax.jit(lambda packed: unpack(packed, shape))(jnp.asarray(buffer))

    for name in ("token_ids", "target_ids", "slots", "draws", "pooling", "wants_prompt_logprobs"):
        np.testing.assert_array_equal(getattr(inputs, name), views[name])
    for name in ("query_starts", "kv_lengths", "page_table"):
        np.testing.assert_array_equal(getattr(inputs.layout, name), views[name])
    assert inputs.layout.num_single_rows == shape.single_rows
    assert inputs.token_ids.shape == (shape.num_tokens,)
    assert inputs.slots.shape == (shape.num_rows,)
    for column, name in enumerate(FLOAT_COLUMNS):
        np.testing.assert_array_equal(getattr(inputs.sampling, name), floats[:, column])
    ints = dict(zip(INT_COLUMNS, views["sampling"][:, len(FLOAT_COLUMNS) :].T, strict=True))
    np.testing.assert_array_equal(inputs.sampling.top_k, ints["top_k"])
    words = np.stack([ints["seed_low"], ints["seed_high"]], 1).view(np.uint32)
    np.testing.assert_array_equal(inputs.sampling.seed, words)
    np.testing.assert_array_equal(inputs.sampling.slots, views["slots"])
    np.testing.assert_array_equal(inputs.sampling.positions, views["kv_lengths"])
    # 3 tokens were generated: those who want 4 or more may not stop yet
    assert inputs.sampling.mask_stops.tolist() == [n > 3 for n in 2 + np.arange(shape.num_rows)]
    np.testing.assert_array_equal(inputs.sampling.wants_logprobs, ints["wants_logprobs"] > 0)


def test_shapes_have_sizes_names_and_an_order():
    decode = StepShape(single_rows=8, chunk_tokens=0, chunk_rows=0, max_pages=2)
    mixed = StepShape(single_rows=8, chunk_tokens=64, chunk_rows=4, max_pages=2)
    assert (decode.num_tokens, decode.num_rows) == (8, 8)
    assert (mixed.num_tokens, mixed.num_rows) == (72, 12)
    assert [str(shape) for shape in sorted([mixed, decode])] == ["decode 8", "decode 8 + prefill 64 in 4"]
