"""What a model family provides. A family is one file with one `MODEL = Model(...)`."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from checkpoints.errors import CheckpointError, UnsupportedCheckpoint
from checkpoints.load import WeightSource
from checkpoints.names import NameMap
from jaxserve.models.config_fields import MAX_LAYERS, check_size


@dataclass(frozen=True, kw_only=True, eq=False)
class Stored:
    """How a file keeps one parameter, where it is more than the same array under another name.

    shape: of the file's tensor, if it is not ours (of one expert's tensor, where the name stands for several). rows and
    columns: which of them are ours, in our order; what is taken is then reshaped to ours. is_transposed: what is taken
    are the transposes of ours. is_packed_so: a quantized checkpoint's packed matrix lies as the plain one does; if not,
    its outputs come first as everywhere, so that it is not transposed and its columns are rows. added: to each value of
    a vector, in float32 (Gemma's files hold w of the norms' factor 1 + w).
    """

    shape: tuple[int, ...] | None = None
    rows: np.ndarray | None = None
    columns: np.ndarray | None = None
    is_transposed: bool = False
    is_packed_so: bool = True
    added: float = 0.0


AS_IT_IS = Stored()


def as_it_is(parameter: str, config: Any) -> Stored:
    """Every parameter is kept as ours."""
    return AS_IT_IS


@contextmanager
def reading(what: str, model_type: object = "such model") -> Iterator[None]:
    """Errors of a config built inside, as errors of the file: CheckpointError for a field that is missing or has a
    value of the wrong kind, UnsupportedCheckpoint for a ValueError, which says what this version computes."""
    try:
        yield
    except CheckpointError:
        raise
    except KeyError as error:
        raise CheckpointError(f"{what}: field {error} is missing") from error
    except ValueError as error:
        raise UnsupportedCheckpoint(f"{what}: {error}") from error
    except (TypeError, AttributeError, ZeroDivisionError, OverflowError) as error:
        raise CheckpointError(f"{what}: a field has a value no {model_type} has ({error})") from error


def check_values(fields: Mapping[str, Any], allowed: Mapping[str, tuple[Any, ...]]) -> None:
    """ValueError, naming the field, for one that is there with another value than is computed; the first is the
    default."""
    for field, values in allowed.items():
        if fields.get(field, values[0]) not in values:
            raise ValueError(f"{field} {fields[field]!r}; this version computes {values[0]!r} only")


def gguf_value(source: WeightSource, key: str) -> Any:
    """What a GGUF states under its architecture's name, as "block_count". CheckpointError where it is missing."""
    name = f"{source.metadata['general.architecture']}.{key}"
    if name not in source.metadata:
        raise CheckpointError(f"{source.path}: metadata {name} is missing")
    if key == "block_count":
        check_size(source.metadata[name], f"{source.path}: metadata {name}", MAX_LAYERS)
    return source.metadata[name]


@dataclass(frozen=True, kw_only=True)
class FileLayout:
    """Where one container keeps the family's parameters.

    names: our path -> tensor name. ignored: tensors left out on purpose. stored(path, config): how it is kept there.
    """

    names: NameMap
    ignored: tuple[str, ...] = ()
    stored: Callable[[str, Any], Stored] = as_it_is


def unchanged[C](config: C, max_model_len: int) -> C:
    """The config, whatever the context."""
    return config


@dataclass(frozen=True, kw_only=True)
class Model:
    """A family. forward: params, config, kernels, inputs, cache -> hidden states [T, D] after the last norm,
    cache, and of a mixture the tokens of each expert by layer [Y, E] (None);
    unembed: params, config, kernels, hidden states [R, D] -> logits [R, V]; for_context: the config for sequences of
    up to so many tokens (some ropes are stretched only for longer ones than the model was trained on)."""

    hf_architectures: tuple[str, ...]
    gguf_architectures: tuple[str, ...]
    config_from_hf: Callable[[Mapping[str, Any]], Any]
    config_from_gguf: Callable[[WeightSource], Any]
    param_specs: Callable[[Any], dict[str, Any]]
    hf_layout: FileLayout
    gguf_layout: FileLayout
    forward: Callable[..., Any]
    unembed: Callable[..., Any]
    for_context: Callable[[Any, int], Any] = unchanged
