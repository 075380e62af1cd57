"""A JAX/XLA inference engine for language models: `LLM` to generate, `SamplingParams` to say how.

The public names load on first use, so that `import jaxserve` and `import jaxserve.scheduler` need neither jax nor
numpy. Everything not named here is internal and may change in any version.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from checkpoints.errors import CheckpointError, UnsupportedCheckpoint
    from jaxserve.errors import (
        ChatTemplateError,
        ConfigError,
        DownloadError,
        EngineDied,
        InvalidRequest,
        JaxserveError,
        ModelNotFound,
        Overloaded,
        PromptTooLong,
        ShuttingDown,
    )
    from jaxserve.offline import LLM
    from jaxserve.outputs import CompletionOutput, EmbeddingOutput, EmbeddingRequestOutput, Logprob, RequestOutput
    from jaxserve.pooling_params import PoolingParams
    from jaxserve.sampling_params import SamplingParams

    __version__: str

__all__ = [
    "LLM",
    "ChatTemplateError",
    "CheckpointError",
    "CompletionOutput",
    "ConfigError",
    "DownloadError",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "EngineDied",
    "InvalidRequest",
    "JaxserveError",
    "Logprob",
    "ModelNotFound",
    "Overloaded",
    "PoolingParams",
    "PromptTooLong",
    "RequestOutput",
    "SamplingParams",
    "ShuttingDown",
    "UnsupportedCheckpoint",
    "__version__",
]

_MODULES = {
    "LLM": "jaxserve.offline",
    "SamplingParams": "jaxserve.sampling_params",
    "PoolingParams": "jaxserve.pooling_params",
    "CompletionOutput": "jaxserve.outputs",
    "EmbeddingOutput": "jaxserve.outputs",
    "EmbeddingRequestOutput": "jaxserve.outputs",
    "Logprob": "jaxserve.outputs",
    "RequestOutput": "jaxserve.outputs",
    "CheckpointError": "checkpoints.errors",
    "UnsupportedCheckpoint": "checkpoints.errors",
}
_NEED_OWN_PACKAGES = ("jaxserve.offline", "checkpoints.errors")


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'jaxserve' has no attribute {name!r}")
    value = globals()[name] = _version() if name == "__version__" else _load(name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _load(name: str) -> object:
    module = _MODULES.get(name, "jaxserve.errors")
    if module in _NEED_OWN_PACKAGES:
        importlib.import_module("jaxserve._shadow").require_own_packages()
    return getattr(importlib.import_module(module), name)


def _version() -> str:
    metadata = importlib.import_module("importlib.metadata")
    try:
        return metadata.version("jaxserve")
    except metadata.PackageNotFoundError:
        return "0+uninstalled"  # a clone on sys.path: nothing recorded a version
