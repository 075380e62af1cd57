"""The list of step shapes: closed, short, and large enough for everything the scheduler may plan."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.engine.buckets import check_limits, choose_shape, step_shapes
from jaxserve.errors import ConfigError


def shapes_for(num_seqs=8, tokens=64, prefills=16, deterministic=False):
    return step_shapes(
        max_num_seqs=num_seqs,
        max_num_batched_tokens=tokens,
        max_prefills=prefills,
        max_pages=4,
        deterministic=deterministic,
    )


LIMITS = st.tuples(st.integers(1, 300), st.integers(0, 3000), st.integers(1, 20), st.booleans())


@given(limits=LIMITS, data=st.data())
def test_every_step_the_limits_allow_has_a_shape(limits, data):
    num_seqs, more_tokens, prefills, deterministic = limits
    tokens = num_seqs + more_tokens
    shapes = shapes_for(num_seqs, tokens, prefills, deterministic)
    singles = data.draw(st.integers(0, num_seqs))
    chunks = data.draw(st.integers(0, min(prefills, num_seqs - singles, (tokens - singles) // 2)))
    chunk_tokens = data.draw(st.integers(2 * chunks, tokens - singles)) if chunks else 0
    shape = choose_shape(shapes, singles, chunk_tokens, chunks)
    assert singles <= shape.single_rows
    assert chunk_tokens <= shape.chunk_tokens
    assert chunks <= shape.chunk_rows
    if not chunks:
        assert shape.chunk_tokens == 0, "decodes do not pay for the room of a prefill"


@given(limits=LIMITS)
def test_the_list_is_short_and_without_repetition(limits):
    num_seqs, more_tokens, prefills, deterministic = limits
    shapes = shapes_for(num_seqs, num_seqs + more_tokens, prefills, deterministic)
    assert len(set(shapes)) == len(shapes) <= 16  # decodes double: padding rows cost as much as rows
    assert all(shape.single_rows <= max(num_seqs, 2) for shape in shapes)


def test_the_smallest_shape_that_fits_is_chosen():
    shapes = shapes_for(num_seqs=64, tokens=512)
    for singles, chunk_tokens, chunks in [(1, 0, 0), (2, 0, 0), (64, 0, 0), (0, 5, 1), (3, 5, 1), (0, 512, 16)]:
        chosen = choose_shape(shapes, singles, chunk_tokens, chunks)
        fitting = [
            shape
            for shape in shapes
            if singles <= shape.single_rows and chunk_tokens <= shape.chunk_tokens and chunks <= shape.chunk_rows
        ]
        assert chosen.num_tokens == min(shape.num_tokens for shape in fitting)


def test_no_step_of_a_single_row_when_deterministic():
    assert min(shape.single_rows for shape in shapes_for()) == 1
    assert min(shape.num_rows for shape in shapes_for(num_seqs=1, tokens=1, deterministic=True)) >= 2


def test_a_step_too_large_is_a_broken_invariant():
    with pytest.raises(AssertionError, match="no compiled shape holds 9 singles"):
        choose_shape(shapes_for(num_seqs=8), 9, 0, 0)


def test_a_step_must_hold_every_running_request():
    check_limits(8, 8)
    with pytest.raises(ConfigError, match=r"--max-num-batched-tokens 7 is below --max-num-seqs 8"):
        check_limits(8, 7)


def test_shapes_are_named_by_what_they_hold():
    names = [str(shape) for shape in shapes_for(num_seqs=2, tokens=64)]
    assert names == ["decode 1", "decode 2", "decode 2 + prefill 64 in 16"] or names == [
        "decode 2",
        "decode 2 + prefill 64 in 16",
    ]
