"""A model on disk -> family, config and parameters on the device, every tensor accounted for."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp

from checkpoints.errors import CheckpointError
from checkpoints.load import NativeWeights, WeightSource, is_gguf, open_weights
from jaxserve.engine.host_memory import one_after_another
from jaxserve.engine.native_parameters import NativeParameters
from jaxserve.engine.parameters import ParameterFile
from jaxserve.engine.placement import Placement, host_dense, placed_dense, placed_packed, placed_vector
from jaxserve.engine.progress import Progress
from jaxserve.engine.read_ahead import read_ahead
from jaxserve.layers.linear import NEIGHBOURS
from jaxserve.models.config_fields import check_sizes
from jaxserve.models.model import FileLayout, Model
from jaxserve.models.registry import model_for_gguf, model_for_hf
from jaxserve.quant.dense import Dense
from jaxserve.quant.quantized import Weight
from jaxserve.quant.schemes.registry import scheme_of
from jaxserve.quant.schemes.scheme import Scheme
from jaxserve.quant.tiled import TiledWeight, can_tile, has_kernel, joined, tiled
from sharding.spec import ArraySpec, map_specs, paths

MAX_CONFIG_BYTES = 16 * 2**20


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """Parameters on the device, and what it took: bytes by format in the file and bytes held.

    notes: what a quantized checkpoint asks for and is not done, a line each.
    """

    model: Model
    config: Any
    params: dict[str, Any]
    path: Path
    file_bytes: dict[str, int]
    held_bytes: int
    num_parameters: int
    is_expanded: bool
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What becomes of the weights; vectors are always float32.

    packed: as in the file. expanded: written out in `dtype`. tiled: in the layout of the CPU kernel, still packed; what
    it has no kernel for is expanded, and an embedding table stays packed, because single rows are read from it.
    """

    layout: Literal["packed", "expanded", "tiled"]
    dtype: str


def load_model(path: Path, recipe: Recipe, progress: Progress, placement: Placement | None = None) -> LoadedModel:
    """The model at `path`: a GGUF file, a folder of safetensors with config.json, or a native checkpoint.

    placement: where each parameter goes, by default to the default device.
    Raises CheckpointError for damaged files and for tensors that are missing, left over or misshapen; ValueError for
    a placement of tiles, which are one CPU's, and for one that cuts packed blocks.
    """
    if placement is not None and recipe.layout == "tiled":
        raise ValueError("weights in tiles are for one CPU: they take no placement")
    with open_weights(path) as source:
        model, config, layout = identify(source)
        specs = model.param_specs(config)
        wanted = paths(specs)
        file = open_parameters(source, layout, config, wanted)
        leaves: dict[str, object] = {}
        with progress.task("loading weights", len(wanted)) as advance, read_ahead(file, list(wanted)) as parameters:
            for parameter in parameters:
                leaves[parameter] = _on_devices(file, parameter, wanted[parameter], recipe, placement)
                file.release(parameter)
                advance(1)
        file_bytes, scheme = file.bytes_by_format, quantization(source)
    params = map_specs(specs, leaves)
    assert isinstance(params, dict)
    if recipe.layout == "tiled":
        params = _joined_neighbours(params)
        if "unembed" not in params:
            params["unembed"] = _laid_out(jax.device_get(params["embed"]), recipe)  # the other use of a tied table
        params = one_after_another(params)
    return LoadedModel(
        model=model,
        config=config,
        params=params,
        path=path,
        file_bytes=file_bytes,
        held_bytes=sum(leaf.nbytes for leaf in jax.tree.leaves(params)),
        num_parameters=sum(spec.size for spec in wanted.values()),
        is_expanded=recipe.layout == "expanded" and any(name not in ("F32",) for name in file_bytes),
        notes=() if scheme is None else scheme.notes,
    )


def open_parameters(
    source: WeightSource, layout: FileLayout, config: Any, wanted: Mapping[str, ArraySpec]
) -> ParameterFile | NativeParameters:
    """The model's parameters in an open file, all accounted for."""
    if isinstance(source, NativeWeights):
        return NativeParameters(source.arrays, wanted)
    return ParameterFile(source, layout, config, wanted, quantization(source))


def quantization(source: WeightSource) -> Scheme | None:
    """The scheme of a quantized checkpoint of safetensors; other containers say the format of each tensor."""
    if isinstance(source, NativeWeights) or is_gguf(source.path) or source.metadata:
        return None
    return scheme_of(read_config(source.path), source.names())


def tiled_formats(loaded: LoadedModel) -> set[str]:
    """The formats whose CPU kernels the model needs."""
    return {weight.format_name for weight in _tiled_weights(loaded)}


@dataclass(frozen=True, kw_only=True)
class FormatsToMultiply:
    """The formats of a file's matrices that have a CPU kernel: of those every token meets, and of experts'."""

    single: frozenset[str]
    experts: frozenset[str]


def cpu_kernel_needs(path: Path) -> tuple[FormatsToMultiply, Any]:
    """The formats that the layout "tiled" would find in a file, which is not read for it, and the model's config."""
    with open_weights(path) as source:
        model, config, layout = identify(source)
        wanted = paths(model.param_specs(config))
        file = open_parameters(source, layout, config, wanted)
        read_by_row = {"embed"} if "unembed" in wanted else set()  # tied, it is the output matrix too
        found: dict[bool, set[str]] = {False: set(), True: set()}
        for parameter, spec in wanted.items():
            name = file.format_of(parameter)
            if _is_tiled(spec) and parameter not in read_by_row and has_kernel(name, spec.shape):
                found["experts" in spec.axes].add(name)
    return FormatsToMultiply(single=frozenset(found[False]), experts=frozenset(found[True])), config


def model_config(path: Path) -> Any:
    """The config of a model on disk."""
    with open_weights(path) as source:
        return identify(source)[1]


def logits_bytes(path: Path, num_rows: int) -> int:
    """What a batch's logits take in float32: the largest temporary buffer of most steps. 0 for a model that cannot be
    read: loading it says why, after the options have been checked."""
    try:
        with open_weights(path) as source:
            return 4 * num_rows * identify(source)[1].vocab_size
    except CheckpointError:
        return 0


def tiled_bytes(loaded: LoadedModel) -> int:
    """Bytes the CPU kernels read in place. A tied embedding table is among them and once more outside, for its rows."""
    return sum(weight.tiles.nbytes for weight in _tiled_weights(loaded))


def _tiled_weights(loaded: LoadedModel) -> list[TiledWeight]:
    nodes = jax.tree.leaves(loaded.params, is_leaf=lambda node: isinstance(node, TiledWeight))
    return [node for node in nodes if isinstance(node, TiledWeight)]


def identify(source: WeightSource) -> tuple[Model, Any, FileLayout]:
    """Family, config and name table of an open file. Raises UnsupportedCheckpoint for an unknown architecture."""
    if source.metadata or is_gguf(source.path):
        architecture = source.metadata.get("general.architecture")
        if not isinstance(architecture, str):
            raise CheckpointError(f"{source.path}: metadata general.architecture is missing")
        model = model_for_gguf(architecture)
        return model, model.config_from_gguf(source), model.gguf_layout
    hf = read_config(source.path)
    architectures = hf.get("architectures") or ["(none given)"]
    if not isinstance(architectures, list) or not isinstance(architectures[0], str):
        raise CheckpointError(
            f"{source.path}: config.json: architectures is {architectures!r:.80}, not a list of names"
        )
    model = model_for_hf(architectures[0])
    check_sizes(hf)
    return model, model.config_from_hf(hf), model.hf_layout


def read_config(path: Path) -> dict[str, Any]:
    """config.json beside the weights. Raises CheckpointError when it is missing, too large or no JSON object."""
    file = (path if path.is_dir() else path.parent) / "config.json"
    if not file.is_file():
        raise CheckpointError(f"{file}: not found; a safetensors model needs its config.json")
    if file.stat().st_size > MAX_CONFIG_BYTES:
        raise CheckpointError(f"{file}: {file.stat().st_size:,} bytes is no sound config.json")
    try:
        config = json.loads(file.read_text())
    except ValueError as error:
        raise CheckpointError(f"{file}: not valid JSON: {error}") from error
    if not isinstance(config, dict):
        raise CheckpointError(f"{file}: holds {type(config).__name__}, not an object")
    return config


def _joined_neighbours(params: Any) -> Any:
    """The tree with tiled weights of the same inputs joined, so that one call multiplies them all."""
    if isinstance(params, tuple):
        return tuple(_joined_neighbours(layer) for layer in params)
    if not isinstance(params, dict):
        return params
    for names in NEIGHBOURS:
        if names[0] in params:
            params = joined(params, names)
    return {name: _joined_neighbours(value) for name, value in params.items()}


def _is_tiled(spec: ArraySpec) -> bool:
    """Whether the CPU kernels multiply with it: matrices, also experts', but not the heads' of MLA."""
    leading = spec.axes[:-2]
    return not spec.is_vector and leading in ((), ("experts",))


def _recipe_of(parameter: str, spec: ArraySpec, recipe: Recipe) -> Recipe:
    """What becomes of one parameter: of an embedding table single rows are read."""
    if recipe.layout != "tiled" or (_is_tiled(spec) and parameter != "embed"):
        return recipe
    return Recipe(layout="packed" if parameter == "embed" else "expanded", dtype=recipe.dtype)


def _on_devices(
    file: ParameterFile | NativeParameters, parameter: str, spec: ArraySpec, recipe: Recipe, placement: Placement | None
) -> object:
    """One parameter, a vector as an array, where the placement says and as the recipe says."""
    sharding = placement.sharding(parameter, spec) if placement else None
    if placement is None or sharding is None:
        is_vector = spec.is_vector
        return jnp.asarray(file.vector(parameter)) if is_vector else _laid_out_of(file, parameter, spec, recipe)
    units = placement.units(spec)
    if spec.is_vector:
        return placed_vector(file.vector(parameter), units, sharding)
    dtype = None if recipe.layout == "packed" else recipe.dtype
    weight = file.placed(parameter, sharding, units, dtype)
    if weight is not None:
        return weight
    whole = file.matrix(parameter)
    if dtype is None and not isinstance(whole, Dense):
        return placed_packed(parameter, whole, units, sharding)
    return placed_dense(host_dense(whole, dtype, _decode_to(recipe.dtype)), units, sharding)


def _laid_out_of(file: ParameterFile | NativeParameters, parameter: str, spec: ArraySpec, recipe: Recipe) -> Weight:
    return _laid_out(file.matrix(parameter), _recipe_of(parameter, spec, recipe))


def _laid_out(weight: Weight, recipe: Recipe) -> Weight:
    """A host weight on the device, in the recipe's layout."""
    if recipe.layout == "tiled" and can_tile(weight):
        return jax.device_put(tiled(weight))
    weight = jax.device_put(weight)
    return weight if recipe.layout == "packed" else _expanded(weight, recipe.dtype)


def _expanded(weight: Weight, dtype: str) -> Weight:
    if isinstance(weight, Dense) and str(weight.array.dtype) == dtype:
        return weight
    return Dense(array=_decode_to(dtype)(weight))


def _decode_to(dtype: str) -> Callable[[Weight], jax.Array]:
    return _DECODERS[dtype]


_DECODERS = {
    dtype: jax.jit(lambda weight, dtype=dtype: weight.decode().astype(dtype)) for dtype in ("float32", "bfloat16")
}
