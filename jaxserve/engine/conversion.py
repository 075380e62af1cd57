"""A model on disk -> a native checkpoint of it, parameter by parameter, in another format where one is asked for."""

import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from checkpoints.errors import CheckpointError
from checkpoints.gguf import open_gguf
from checkpoints.gguf_header import write_gguf_part
from checkpoints.load import NativeWeights, WeightSource, is_gguf, open_weights
from checkpoints.native import ORIGIN_NAME, Manifest, NativeParameter, OriginTensor
from checkpoints.native_writing import check_target, writing_native
from jaxserve.engine.loading import LoadedModel, identify, open_parameters
from jaxserve.engine.native_parameters import NativeParameters
from jaxserve.engine.parameters import ParameterFile
from jaxserve.engine.progress import Progress
from jaxserve.engine.read_ahead import read_ahead
from jaxserve.engine.spread import division_of
from jaxserve.quant.dense import Dense
from jaxserve.quant.formats import FORMATS
from jaxserve.quant.quantized import Format, Weight, stacked, take_rows
from jaxserve.quant.quantized import num_bytes as bytes_of
from sharding.plan import ShardingPlan
from sharding.spec import ArraySpec, paths

# What lies beside the weights of a folder and says how to use them: config, tokenizer, template, generation defaults.
SIDE_PATTERNS = ("*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken", "*/config.json")
LEFT_OUT = ("jaxserve.json", "*.index.json", "*.safetensors.*")
MAX_SIDE_BYTES = 256 << 20
MAX_ORIGIN_TENSOR_BYTES = 16 << 20  # tensors beside the parameters are tables of rope factors
ENCODE_BYTES = 64 << 20  # of float32 values in memory at once


@dataclass(frozen=True, kw_only=True)
class Converted:
    """kept: matrices that stayed in their format because their rows are not whole blocks of the one asked for."""

    path: Path
    num_bytes: int
    bytes_by_format: Mapping[str, int]
    kept: tuple[str, ...]


def convert(
    source: Path,
    target: Path,
    format_name: str | None,
    progress: Progress,
    *,
    overwrite: bool,
    plan: ShardingPlan | None = None,
) -> Converted:
    """The model at `source` as a native checkpoint at `target`, which appears when it is complete.

    format_name: of FORMATS, for all matrices; None keeps each as it is. Vectors are float32. plan: whose devices each
    read their chunks and no others; any other plan reads the checkpoint too.
    Raises CheckpointError for what cannot be read, where something is in the way, and where the disk is too small;
    ValueError for a plan that the model cannot be cut by.
    """
    check_target(target, overwrite=overwrite)
    wanted_format = None if format_name is None else FORMATS[format_name]
    with open_weights(source) as weights:
        model, config, layout = identify(weights)
        if plan is not None:
            division_of(plan, config)
        wanted = paths(model.param_specs(config))
        file = open_parameters(weights, layout, config, wanted)
        formats = {name: _target_format(file, name, spec, wanted_format) for name, spec in wanted.items()}

        def in_turn() -> Iterator[tuple[str, Weight]]:
            with read_ahead(file, list(wanted)) as names:
                for name in names:
                    yield name, _in_format(file, name, wanted[name], formats[name])
                    file.release(name)

        parameters = _written(weights, file, target, in_turn(), wanted, formats, progress, plan, overwrite=overwrite)
    kept = [n for n, spec in wanted.items() if format_name not in (None, formats[n]) and not spec.is_vector]
    return _converted(target, parameters, kept)


def save(loaded: LoadedModel, target: Path, progress: Progress, *, overwrite: bool) -> Converted:
    """A loaded model as a native checkpoint, its weights as they are held, on however many devices.

    Config and tokenizer are those of the file it was loaded from. Raises ValueError for weights in tiles.
    """
    check_target(target, overwrite=overwrite)
    with open_weights(loaded.path) as weights:
        model, config, layout = identify(weights)
        wanted = paths(model.param_specs(config))
        file = open_parameters(weights, layout, config, wanted)
        held = {name: _leaf(loaded.params, name) for name in wanted}
        formats = {name: "F32" if spec.is_vector else held[name].format for name, spec in wanted.items()}
        for name, found in formats.items():
            if found not in FORMATS:
                raise ValueError(f"parameter {name} is held as {found}; a native checkpoint keeps {', '.join(FORMATS)}")
        in_turn = ((n, Dense(array=held[n]) if wanted[n].is_vector else held[n]) for n in wanted)
        parameters = _written(weights, file, target, in_turn, wanted, formats, progress, None, overwrite=overwrite)
    return _converted(target, parameters, [])


def _leaf(params: Any, name: str) -> Any:
    for key in name.split("."):
        params = params[int(key)] if isinstance(params, tuple) else params[key]
    return params


def _written(
    weights: WeightSource,
    file: ParameterFile | NativeParameters,
    target: Path,
    in_turn: Iterator[tuple[str, Weight]],
    wanted: Mapping[str, ArraySpec],
    formats: Mapping[str, str],
    progress: Progress,
    plan: ShardingPlan | None,
    *,
    overwrite: bool,
) -> dict[str, NativeParameter]:
    """Writes the checkpoint; what its manifest says of each parameter."""
    _check_room(target, wanted, formats)
    parameters: dict[str, NativeParameter] = {}
    with writing_native(target, overwrite=overwrite) as writer:
        with progress.task("writing weights", len(wanted)) as advance:
            for name, weight in in_turn:
                parts = {"": weight.array} if isinstance(weight, Dense) else vars(weight)
                cut = None if plan is None else [plan.size(axis) for axis in wanted[name].axes]
                arrays = {}
                for part, array in parts.items():
                    fitting = cut if cut is not None and len(cut) == array.ndim else None
                    arrays[part] = writer.write(name, part, np.asarray(array), fitting)
                parameters[name] = NativeParameter(format=formats[name], shape=wanted[name].shape, arrays=arrays)
                advance(1)
        _copy_side_files(weights.path, writer.path)
        writer.finish(Manifest(parameters=parameters, origin_tensors=_origin(weights, file, writer.path)))
    return parameters


def _converted(target: Path, parameters: Mapping[str, NativeParameter], kept: list[str]) -> Converted:
    bytes_by_format: dict[str, int] = {}
    for parameter in parameters.values():
        bytes_by_format[parameter.format] = bytes_by_format.get(parameter.format, 0) + parameter.num_bytes
    num_bytes = sum(path.stat().st_size for path in target.rglob("*") if path.is_file())
    return Converted(path=target, num_bytes=num_bytes, bytes_by_format=bytes_by_format, kept=tuple(kept))


def _target_format(file: ParameterFile | NativeParameters, name: str, spec: ArraySpec, wanted: Format | None) -> str:
    if spec.is_vector:
        return "F32"
    fits = wanted is not None and spec.shape[-1] % wanted.block_length == 0
    found = wanted.name if wanted is not None and fits else file.format_of(name)
    if found in FORMATS:
        return found
    raise CheckpointError(
        f"parameter {name} is stored as {found}, which a native checkpoint does not keep; choose another with --format"
    )


def _check_room(target: Path, wanted: Mapping[str, ArraySpec], formats: Mapping[str, str]) -> None:
    needed = sum(_stored_bytes(spec, formats[name]) for name, spec in wanted.items())
    free = shutil.disk_usage(target.absolute().parent).free
    if needed > free:
        raise CheckpointError(f"{target}: needs {needed:,} bytes, {free:,} are free there; choose another disk")


def _stored_bytes(spec: ArraySpec, format_name: str) -> int:
    if spec.is_vector:
        return 4 * spec.size
    *leading, num_outputs, num_inputs = spec.shape
    return int(np.prod(leading, dtype=np.int64)) * bytes_of(FORMATS[format_name].spec(num_outputs, num_inputs))


def _in_format(file: ParameterFile | NativeParameters, name: str, spec: ArraySpec, format_name: str) -> Weight:
    weight = Dense(array=file.vector(name)) if spec.is_vector else file.matrix(name)
    return weight if weight.format == format_name else encoded(weight, FORMATS[format_name])


def encoded(weight: Weight, wanted: Format) -> Weight:
    """The weight in another format, on the host; some rows at a time are written out in float32."""
    if len(weight.shape) > 2:
        each = (jax.tree.map(lambda leaf, index=index: leaf[index], weight) for index in range(weight.shape[0]))
        return stacked([encoded(one, wanted) for one in each])
    num_outputs, num_inputs = (weight.shape[axis] for axis in (-2, -1))
    step = max(1, ENCODE_BYTES // (4 * num_inputs))
    parts = []
    for start in range(0, num_outputs, step):
        rows = take_rows(weight, np.arange(start, min(start + step, num_outputs)))
        parts.append(wanted.encode(np.asarray(rows.decode())))
    return parts[0] if len(parts) == 1 else jax.tree.map(lambda *leaves: np.concatenate(leaves), *parts)


def _copy_side_files(source: Path, folder: Path) -> None:
    """What lies beside the weights; of a GGUF file, its metadata are all there is."""
    if is_gguf(source):
        return
    beside = source if source.is_dir() else source.parent
    for path in sorted({found for pattern in SIDE_PATTERNS for found in beside.glob(pattern)}):
        if not path.is_file() or any(path.match(pattern) for pattern in LEFT_OUT):
            continue
        if path.stat().st_size > MAX_SIDE_BYTES:
            raise CheckpointError(f"{path}: {path.stat().st_size:,} bytes are too many for a file beside weights")
        copy = folder / path.relative_to(beside)
        copy.parent.mkdir(exist_ok=True)
        shutil.copyfile(path, copy)


def _origin(weights: WeightSource, file: ParameterFile | NativeParameters, folder: Path) -> dict[str, OriginTensor]:
    """The table of a GGUF file's tensors; its metadata, and tensors that are no parameters, become origin.gguf."""
    if isinstance(weights, NativeWeights):
        if (weights.path / ORIGIN_NAME).is_file():
            shutil.copyfile(weights.path / ORIGIN_NAME, folder / ORIGIN_NAME)
        return dict(weights.arrays.origin_tensors)
    if not weights.metadata:
        return {}
    infos = {name: weights.info(name) for name in weights.names()}
    taken = file.tensor_names if isinstance(file, ParameterFile) else frozenset()
    others = [n for n, info in infos.items() if n not in taken and info.num_bytes <= MAX_ORIGIN_TENSOR_BYTES]
    with open_gguf(weights.path) as gguf:
        write_gguf_part(gguf, others, folder / ORIGIN_NAME)
    return {name: OriginTensor(format=info.format, shape=info.shape) for name, info in infos.items()}
