"""Gemma 3 checkpoints against logits of an independent implementation (transformers, float32, one prompt at a time)."""

import pytest
from parity import FIXTURES, TOLERANCE, assert_decode_parity, assert_parity

from pallas_kernels.kernels import REFERENCE

FOLDER = FIXTURES / "models" / "gemma3_text"


@pytest.mark.parametrize("change", [{}, {"kernels": REFERENCE}, {"stacked": True}, {"weights": "packed"}], ids=str)
def test_logits_at_every_position(change):
    assert_parity(FOLDER, **change)


def test_logits_of_tokens_decoded_one_by_one():
    assert_decode_parity(FOLDER)
