"""A model as shapes: its config and the formats of its weights from files, no value of them read."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from checkpoints.errors import CheckpointError
from checkpoints.load import is_gguf, open_weights
from checkpoints.native import is_native
from jaxserve.engine.loading import identify, open_parameters, read_config
from jaxserve.errors import ConfigError
from jaxserve.models.model import Model
from jaxserve.models.registry import model_for_hf
from jaxserve.quant.dense import Dense
from jaxserve.quant.formats import FORMATS, format_named
from jaxserve.quant.quantized import Format
from sharding.spec import ArraySpec, paths

DEFAULT_FORMAT = "BF16"


@dataclass(frozen=True, kw_only=True)
class DescribedModel:
    """Family, config, and the format that each matrix has in the file. has_weights: whether there is a file of them."""

    model: Model
    config: Any
    format_of: Callable[[str], str]
    has_weights: bool

    @property
    def num_parameters(self) -> int:
        return sum(spec.size for spec in paths(self.model.param_specs(self.config)).values())

    def weight(self, path: str, spec: ArraySpec, expanded_to: str | None) -> Any:
        """A parameter with a jax.ShapeDtypeStruct for each array, as loading it would hold it.

        expanded_to: the type that matrices are written out in; None where they stay packed.
        """
        if spec.is_vector:
            return jax.ShapeDtypeStruct(spec.shape, np.float32)
        if expanded_to is not None:
            return Dense(array=jax.ShapeDtypeStruct(spec.shape, expanded_to))
        *leading, num_outputs, num_inputs = spec.shape
        packed = self._format(path, spec).spec(num_outputs, num_inputs)
        return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((*leading, *leaf.shape), leaf.dtype), packed)

    def is_packed(self, path: str, spec: ArraySpec, expanded_to: str | None) -> bool:
        """Whether a parameter is held in blocks."""
        return expanded_to is None and not spec.is_vector and self._format(path, spec).block_length > 1

    def _format(self, path: str, spec: ArraySpec) -> Format:
        known = format_named(self.format_of(path), wanted_by=path)
        is_whole = spec.shape[-1] % known.block_length == 0
        return known if is_whole else FORMATS[DEFAULT_FORMAT]  # such rows stay plain, as `jaxserve convert` leaves them


def describe_model(path: Path, weights: str | None) -> DescribedModel:
    """The model of a GGUF file, a folder with or without weights, or a config.json.

    weights: the format of all matrices in place of the file's. Raises CheckpointError for what cannot be read,
    ConfigError for a format this version has not.
    """
    if weights is not None and weights.upper() not in FORMATS:
        raise ConfigError(f"--weights {weights}: expected one of {', '.join(FORMATS).lower()}")
    wanted = None if weights is None else weights.upper()
    if _is_config_alone(path):
        return _of_config(path, wanted or DEFAULT_FORMAT)
    with open_weights(path) as source:
        model, config, layout = identify(source)
        specs = paths(model.param_specs(config))
        file = open_parameters(source, layout, config, specs)
        formats = {name: wanted or file.format_of(name) for name in specs}
    unknown = sorted(set(formats.values()) - FORMATS.keys())
    if unknown:
        raise ConfigError(f"{path}: matrices in {', '.join(unknown)} cannot be planned yet; --weights bf16 can")
    return DescribedModel(model=model, config=config, format_of=formats.__getitem__, has_weights=True)


def _is_config_alone(path: Path) -> bool:
    if path.is_file():
        return not is_gguf(path)
    return not is_native(path) and not any(path.glob("*.safetensors"))


def _of_config(path: Path, weights: str) -> DescribedModel:
    if path.is_file() and path.name != "config.json":
        raise CheckpointError(f"{path}: expected a GGUF file, a folder, or a config.json")
    hf = read_config(path)
    architectures = hf.get("architectures")
    if not isinstance(architectures, list) or not architectures or not isinstance(architectures[0], str):
        raise CheckpointError(f"{path}: config.json: architectures is {architectures!r:.80}, not a list of names")
    model = model_for_hf(architectures[0])
    config = model.config_from_hf(hf)
    return DescribedModel(model=model, config=config, format_of=lambda path: weights, has_weights=False)
