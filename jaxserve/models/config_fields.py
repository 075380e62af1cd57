"""Sizes in a config.json: whole numbers within reason, before anything is computed from them."""

from collections.abc import Mapping
from typing import Any

from checkpoints.errors import CheckpointError

MAX_LAYERS = 1 << 12
MAX_SIZE = 1 << 26
_REQUIRED = {
    "num_hidden_layers": MAX_LAYERS,
    "hidden_size": MAX_SIZE,
    "num_attention_heads": MAX_SIZE,
    "vocab_size": MAX_SIZE,
}
_OPTIONAL = {
    "num_key_value_heads": MAX_SIZE, "head_dim": MAX_SIZE, "intermediate_size": MAX_SIZE,
    "max_position_embeddings": 1 << 40, "num_experts": MAX_SIZE, "num_local_experts": MAX_SIZE,
    "n_routed_experts": MAX_SIZE, "num_experts_per_tok": MAX_SIZE, "moe_intermediate_size": MAX_SIZE,
    "shared_expert_intermediate_size": MAX_SIZE, "kv_lora_rank": MAX_SIZE, "q_lora_rank": MAX_SIZE,
    "qk_nope_head_dim": MAX_SIZE, "qk_rope_head_dim": MAX_SIZE, "v_head_dim": MAX_SIZE,
}  # fmt: skip
_TABLES = ("rope_scaling", "rope_parameters", "text_config")


def check_sizes(config: Mapping[str, Any], where: str = "config.json") -> None:
    """Raises CheckpointError, naming the field, for a size that none can be; fields that are absent are not missed."""
    for field in _TABLES:
        if config.get(field) is not None and not isinstance(config[field], dict):
            raise CheckpointError(f"{where}: {field} is {config[field]!r:.60}, not a table")
    for field, largest in (_REQUIRED | _OPTIONAL).items():
        if field not in config or (config[field] is None and field in _OPTIONAL):
            continue
        check_size(config[field], f"{where}: {field}", largest)
    if isinstance(config.get("text_config"), dict):
        check_sizes(config["text_config"], f"{where}: text_config")


def check_size(value: Any, name: str, largest: int) -> None:
    """Raises CheckpointError unless the value is a whole number from 1 to `largest`."""
    if type(value) is not int or not 1 <= value <= largest:
        raise CheckpointError(f"{name} is {value!r:.60}; a whole number from 1 to {largest:,} is expected")


def first_layers(count: Any) -> tuple[int, ...]:
    """The numbers of so many first layers. ValueError for more than a model can have."""
    if type(count) is not int or not 0 <= count <= MAX_LAYERS:
        raise ValueError(f"{count!r:.60} dense layers at the start; from 0 to {MAX_LAYERS:,} are expected")
    return tuple(range(count))
