"""The families this version runs, by the architecture names that files state."""

from checkpoints.errors import UnsupportedCheckpoint
from jaxserve.models import (
    deepseek,
    gemma2,
    gemma3,
    glm4_moe,
    gpt_oss,
    granitemoe,
    llama,
    mixtral,
    olmoe,
    phi3,
    qwen,
    qwen_moe,
)
from jaxserve.models.model import Model

MODELS: tuple[Model, ...] = (
    llama.MODEL,
    qwen.MODEL,
    gemma2.MODEL,
    gemma3.MODEL,
    gemma3.WITH_VISION,
    phi3.MODEL,
    mixtral.MODEL,
    qwen_moe.MODEL,
    olmoe.MODEL,
    granitemoe.MODEL,
    glm4_moe.MODEL,
    gpt_oss.MODEL,
    deepseek.MODEL,
)


def model_for_hf(architecture: str) -> Model:
    """The family of an HF `architectures` entry. Raises UnsupportedCheckpoint listing what is known."""
    for model in MODELS:
        if architecture in model.hf_architectures:
            return model
    known = ", ".join(sorted(a for m in MODELS for a in m.hf_architectures))
    raise UnsupportedCheckpoint(f"architecture {architecture!r} is not supported; this version runs {known}")


def model_for_gguf(architecture: str) -> Model:
    """The family of a GGUF `general.architecture`. Raises UnsupportedCheckpoint listing what is known."""
    for model in MODELS:
        if architecture in model.gguf_architectures:
            return model
    known = ", ".join(sorted(a for m in MODELS for a in m.gguf_architectures))
    raise UnsupportedCheckpoint(f"GGUF architecture {architecture!r} is not supported; this version runs {known}")
