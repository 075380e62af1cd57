"""What a model family provides. A family is one file with one `MODEL = Model(...)`."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from checkpoints.errors import CheckpointError
from checkpoints.load import WeightSource
from checkpoints.names import NameMap

RowOrder = Callable[[str, Any], np.ndarray | None]


def file_order(parameter: str, config: Any) -> None:
    """Rows are taken as the file has them."""
    return None


def nothing_added(parameter: str) -> float:
    """Vectors are taken as the file has them."""
    return 0.0


def gguf_value(source: WeightSource, key: str) -> Any:
    """What a GGUF states under its architecture's name, as "block_count". CheckpointError where it is missing."""
    name = f"{source.metadata['general.architecture']}.{key}"
    if name not in source.metadata:
        raise CheckpointError(f"{source.path}: metadata {name} is missing")
    return source.metadata[name]


@dataclass(frozen=True, kw_only=True)
class FileLayout:
    """Where one container keeps the family's parameters.

    names: our path -> tensor name. ignored: tensors left out on purpose. row_order(path, config): for output row i of
    ours the row of the file, or None where they agree (GGUF's llama permutes q and k). added_to_vectors(path): what is
    added to each value of a vector, in float32 (Gemma's files hold w of the norms' factor 1 + w).
    """

    names: NameMap
    ignored: tuple[str, ...] = ()
    row_order: RowOrder = file_order
    added_to_vectors: Callable[[str], float] = nothing_added


@dataclass(frozen=True, kw_only=True)
class Model:
    """A family. forward: params, config, kernels, inputs, cache -> hidden states [T, D] after the last norm, cache;
    unembed: params, config, kernels, hidden states [R, D] -> logits [R, V]."""

    hf_architectures: tuple[str, ...]
    gguf_architectures: tuple[str, ...]
    config_from_hf: Callable[[Mapping[str, Any]], Any]
    config_from_gguf: Callable[[WeightSource], Any]
    param_specs: Callable[[Any], dict[str, Any]]
    hf_layout: FileLayout
    gguf_layout: FileLayout
    forward: Callable[..., Any]
    unembed: Callable[..., Any]
