"""compressed-tensors' configuration: groups of modules, and how the weights of each are stored."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from checkpoints.errors import CheckpointError, UnsupportedCheckpoint
from jaxserve.quant.schemes import settings

Storage = Literal["packed", "int8", "float8", "nvfp4", "mxfp4"]
_STORAGE_OF_FORMAT: dict[str, tuple[Storage, ...]] = {
    "pack-quantized": ("packed",),
    "int-quantized": ("int8",),
    "float-quantized": ("float8",),
    "naive-quantized": ("int8", "float8"),
    "nvfp4-pack-quantized": ("nvfp4",),
    "mxfp4-pack-quantized": ("mxfp4",),
}
_STRATEGIES: dict[Storage, tuple[str, ...]] = {
    "packed": ("channel", "group"),
    "int8": ("tensor", "channel", "group"),
    "float8": ("tensor", "channel", "block"),
    "nvfp4": ("tensor_group",),
    "mxfp4": ("group",),
}
_MAX_PATTERN, _MAX_REPEATS = 300, 4  # a name of 100 letters is then matched in seconds at the worst


@dataclass(frozen=True, kw_only=True)
class Group:
    """block is outputs and inputs that share a scale, None for all there are."""

    name: str
    targets: tuple[str, ...]
    storage: Storage
    bits: int
    block: tuple[int | None, int | None]
    is_symmetric: bool
    has_order: bool


def read_groups(config: Mapping[str, Any]) -> tuple[Group, ...]:
    """The groups whose weights are quantized. Raises CheckpointError, UnsupportedCheckpoint for variants."""
    settings.one_of(config, "quantization_status", ("compressed",), "compressed")
    settings.refuse(config, "transform_config")
    sparsity = settings.table(config.get("sparsity_config"), "sparsity_config")
    settings.one_of(sparsity, "format", ("dense",), "dense", f"{settings.WHERE}: sparsity_config")
    tables = settings.table(config.get("config_groups"), "config_groups")
    groups = [_group(name, settings.table(entry, name), config) for name, entry in tables.items()]
    found = tuple(group for group in groups if group is not None)
    if not found:
        raise CheckpointError(f"{settings.WHERE}: config_groups names no weights")
    return found


def activation_notes(config: Mapping[str, Any]) -> tuple[str, ...]:
    """What the configuration rounds besides weights, a line each; this version does not."""
    notes = []
    for name, entry in settings.table(config.get("config_groups"), "config_groups").items():
        for key in ("input_activations", "output_activations"):
            wanted = settings.table(settings.table(entry, name).get(key), f"{name}: {key}")
            if wanted:
                kind = f"{wanted.get('type')} of {wanted.get('num_bits')} bits"
                notes.append(f"{key} are not rounded to {kind:.40} ({name:.40} of the checkpoint's configuration)")
    if settings.table(config.get("kv_cache_scheme"), "kv_cache_scheme"):
        notes.append("the cache's scales in the checkpoint (kv_cache_scheme) are not used")
    return tuple(notes)


def group_of(module: str, groups: Sequence[Group]) -> Group:
    """The group a module belongs to: one that names it, else one with a pattern for it, else the one for all of them.

    Raises CheckpointError where there is none.
    """
    for rank in (module.__eq__, lambda target: _matches(target, module), "Linear".__eq__):
        for group in groups:
            if any(rank(target) for target in group.targets):
                return group
    raise CheckpointError(f"{settings.WHERE}: no group of config_groups has the module {module!r}, which is quantized")


def _matches(target: str, module: str) -> bool:
    return target.startswith("re:") and re.match(target[3:], module) is not None


def _group(name: str, entry: Mapping[str, Any], config: Mapping[str, Any]) -> Group | None:
    where = f"{settings.WHERE}: {name:.40}"
    weights = settings.table(entry.get("weights"), "weights", where)
    if not weights:
        return None
    settings.refuse(weights, "dynamic", where=f"{where}: weights")
    storage = _storage(entry, weights, config, where)
    strategy = weights.get("strategy") or _strategy_of_size(weights)
    settings.one_of({"strategy": strategy}, "strategy", _STRATEGIES[storage], None, f"{where}: weights")
    is_symmetric = settings.one_of(weights, "symmetric", (False, True), True, where)
    if not is_symmetric and storage not in ("packed", "int8"):
        raise UnsupportedCheckpoint(f"{where}: symmetric is False; this version reads floats without zero points")
    has_order = settings.one_of(weights, "actorder", ("group", "weight", "static"), "weight", where) == "group"
    return Group(
        name=name,
        targets=_targets(entry, where),
        storage=storage,
        bits=settings.one_of(weights, "num_bits", _bits(storage), None, where),
        block=_block(weights, strategy, where),
        is_symmetric=is_symmetric,
        has_order=has_order and strategy == "group",
    )


def _storage(entry: Mapping[str, Any], weights: Mapping[str, Any], config: Mapping[str, Any], where: str) -> Storage:
    own = entry.get("format") or config.get("format")
    name = settings.one_of({"format": own}, "format", tuple(_STORAGE_OF_FORMAT), None, where)
    kind = settings.one_of(weights, "type", ("int", "float"), "int", where)
    fits: list[Storage] = [s for s in _STORAGE_OF_FORMAT[name] if (s in ("packed", "int8")) == (kind == "int")]
    if not fits:
        raise CheckpointError(f"{where}: weights are of type {kind}, which {name} does not store")
    return fits[0]


def _bits(storage: Storage) -> tuple[int, ...]:
    return {"packed": (4, 8), "int8": (8,), "float8": (8,)}.get(storage, (4,))


def _strategy_of_size(weights: Mapping[str, Any]) -> str:
    """What compressed-tensors takes where no strategy is given."""
    size = weights.get("group_size")
    return "tensor" if size is None else "channel" if size == -1 else "group"


def _block(weights: Mapping[str, Any], strategy: str, where: str) -> tuple[int | None, int | None]:
    if strategy == "block":
        structure = weights.get("block_structure")
        if isinstance(structure, str) and re.fullmatch(r"\d{1,6}x\d{1,6}", structure):
            structure = [int(size) for size in structure.split("x")]
        return settings.block_shape(structure, "block_structure", where)
    if strategy in ("group", "tensor_group"):
        return 1, settings.whole_number(weights.get("group_size"), "group_size", where)
    return (1, None) if strategy == "channel" else (None, None)


def _targets(entry: Mapping[str, Any], where: str) -> tuple[str, ...]:
    """Names of modules, "re:" patterns and "Linear". A pattern that could take forever to match is refused."""
    targets = entry.get("targets")
    if not isinstance(targets, list) or not all(isinstance(target, str) for target in targets):
        raise CheckpointError(f"{where}: targets is {targets!r:.80}, not a list of names")
    for target in targets:
        if target.startswith("re:") and not _is_quick(target[3:]):
            raise UnsupportedCheckpoint(f"{where}: the pattern {target!r:.80} is too complex for this version")
    return tuple(targets)


def _is_quick(pattern: str) -> bool:
    """Short, sound, with few repeats and none of a group."""
    try:
        re.compile(pattern)
    except (re.error, OverflowError, RecursionError):
        return False
    bare = re.sub(r"\\.", "", pattern)
    repeats = re.findall(r"[*+{]", bare)
    return len(pattern) <= _MAX_PATTERN and len(repeats) <= _MAX_REPEATS and not re.search(r"\)[*+{]", bare)
