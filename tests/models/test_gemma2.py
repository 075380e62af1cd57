"""Gemma 2 checkpoints against logits of an independent implementation (transformers, float32)."""

from parity import FIXTURES, assert_parity, written_as_gguf

from jaxserve.models.gemma2 import MODEL
from pallas_kernels.kernels import REFERENCE

FOLDER = FIXTURES / "models" / "gemma2"


def test_logits_by_the_reference_kernels():
    assert_parity(FOLDER, kernels=REFERENCE)


def test_the_same_model_as_a_gguf(tmp_path):
    """Its norms hold 1 + w, and its queries are scaled by the head size, 24; the fixture scales by 32."""
    metadata = {
        "block_count": 3,
        "embedding_length": 64,
        "feed_forward_length": 128,
        "context_length": 512,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "attention.key_length": 24,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "attention.sliding_window": 32,
        "attn_logit_softcapping": 4.0,
        "final_logit_softcapping": 2.5,
    }
    factors = {"q": (24 / 32) ** 0.5}
    assert_parity(FOLDER, written_as_gguf(FOLDER, tmp_path / "model.gguf", MODEL, metadata, factors))
