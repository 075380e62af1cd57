"""generation_config.json of a model folder: the sampling its authors recommend, and the ids that end a generation.

Knows the file's fields and their types. What range a value may have is the business of whoever samples with it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from checkpoints.errors import CheckpointError
from checkpoints.json_files import read_json_object

FILE_NAME = "generation_config.json"
MAX_BYTES = 1 << 20
MAX_EOS_TOKENS = 16  # more than any known model lists; a step's stop table has room for so many

_FLOATS = ("temperature", "top_p", "min_p", "repetition_penalty")
_INTEGERS = ("top_k", "max_new_tokens")


@dataclass(frozen=True, kw_only=True)
class GenerationConfig:
    """What the file says. sampling: field -> value under the file's own names, fields that are absent or null left
    out. do_sample false stands in it as temperature 0, whatever temperature the file has besides; do_sample true
    without a temperature as 1, which is what transformers takes then."""

    path: Path
    sampling: Mapping[str, float | int] = field(default_factory=dict)
    eos_token_ids: frozenset[int] = frozenset()


def generation_config_beside(weights: Path) -> Path | None:
    """The generation_config.json that belongs to a folder or file of safetensors, None where there is none."""
    file = (weights if weights.is_dir() else weights.parent) / FILE_NAME
    return file if file.is_file() else None


def read_generation_config(file: Path) -> GenerationConfig:
    """The content of a generation_config.json. Raises CheckpointError naming the file and the field at fault."""
    content = read_json_object(file, max_bytes=MAX_BYTES)
    sampling: dict[str, float | int] = {}
    for name in _FLOATS:
        value = content.get(name)
        if value is not None and not (type(value) is float or (type(value) is int and abs(value) < 2**53)):
            raise CheckpointError(f"{file}: {name} must be a number, got {value!r:.80}")
        if value is not None:
            sampling[name] = float(value)
    for name in _INTEGERS:
        value = content.get(name)
        if value is not None and type(value) is not int:
            raise CheckpointError(f"{file}: {name} must be an integer, got {value!r:.80}")
        if value is not None:
            sampling[name] = value
    does_sample = _does_sample(content, file)
    if does_sample is not None:
        sampling["temperature"] = sampling.get("temperature", 1.0) if does_sample else 0.0
    return GenerationConfig(path=file, sampling=sampling, eos_token_ids=listed_eos_ids(content, file))


def listed_eos_ids(content: Mapping[str, Any], file: Path) -> frozenset[int]:
    """The ids of a file's eos_token_id: one or a list. Raises CheckpointError for anything else."""
    listed = content.get("eos_token_id")
    ids = listed if isinstance(listed, list) else [] if listed is None else [listed]
    if not all(type(token) is int and 0 <= token < 2**31 for token in ids):
        raise CheckpointError(f"{file}: eos_token_id must be a token id or a list of them, got {listed!r:.80}")
    if len(set(ids)) > MAX_EOS_TOKENS:
        raise CheckpointError(f"{file}: eos_token_id lists {len(set(ids))} ids; at most {MAX_EOS_TOKENS}")
    return frozenset(ids)


def _does_sample(content: Mapping[str, Any], file: Path) -> bool | None:
    value = content.get("do_sample")
    if value is not None and not isinstance(value, bool):
        raise CheckpointError(f"{file}: do_sample must be true or false, got {value!r:.80}")
    return value
