"""Values of a quantization's configuration, checked: of the right type and among those that are known."""

from collections.abc import Collection, Mapping
from typing import Any

from checkpoints.errors import CheckpointError, UnsupportedCheckpoint

WHERE = "config.json: quantization_config"


def one_of(config: Mapping[str, Any], key: str, allowed: Collection[Any], default: Any, where: str = WHERE) -> Any:
    """The setting, or the default where it is absent or null. UnsupportedCheckpoint, with what is allowed, if unknown.

    Settings that are numbers, truth values or names; true is not 1 here.
    """
    value = config.get(key)
    value = default if value is None else value
    if any(type(value) is type(known) and value == known for known in allowed):
        return value
    known = ", ".join(str(item) for item in allowed)
    raise UnsupportedCheckpoint(f"{where}: {key} is {value!r:.80}; this version reads {known}")


def whole_number(value: Any, name: str, where: str = WHERE) -> int:
    """A positive whole number. Raises CheckpointError."""
    if type(value) is not int or not 0 < value < 2**31:
        raise CheckpointError(f"{where}: {name} is {value!r:.80}, not a positive whole number")
    return value


def group_length(config: Mapping[str, Any], default: int | None = None) -> int | None:
    """`group_size`; None for one group a row, which is written as -1. Raises CheckpointError."""
    value = config.get("group_size", default)
    return None if value in (-1, None) else whole_number(value, "group_size")


def block_shape(value: Any, name: str, where: str = WHERE) -> tuple[int, int]:
    """Outputs and inputs of a block. Raises CheckpointError."""
    if not isinstance(value, list) or len(value) != 2:
        raise CheckpointError(f"{where}: {name} is {value!r:.80}, not two numbers")
    return whole_number(value[0], name, where), whole_number(value[1], name, where)


def table(value: Any, name: str, where: str = WHERE) -> dict[str, Any]:
    """A table, empty where the file has null. Raises CheckpointError."""
    if value is not None and not isinstance(value, dict):
        raise CheckpointError(f"{where}: {name} is {value!r:.80}, not a table")
    return value or {}


def refuse(config: Mapping[str, Any], *keys: str, where: str = WHERE) -> None:
    """UnsupportedCheckpoint if one of these settings is there and says anything but no."""
    for key in keys:
        if config.get(key):
            raise UnsupportedCheckpoint(f"{where}: {key} is {config[key]!r:.80}; this version reads files without it")
