"""The families this version runs, by the architecture names that files state."""

from checkpoints.errors import UnsupportedCheckpoint
from jaxserve.models import gemma2, gemma3, llama, qwen
from jaxserve.models.model import Model

MODELS: tuple[Model, ...] = (llama.MODEL, qwen.MODEL, gemma2.MODEL, gemma3.MODEL, gemma3.WITH_VISION)


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
