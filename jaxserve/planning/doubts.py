"""What is odd about a compiled program: signs that it moves or copies far more than its arithmetic needs."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

Kind = Literal["temp", "gathered_weight", "not_aliased", "dense_experts", "decoded_weights", "other_kernels"]


def doubt(kind: Kind, message: str) -> dict[str, str]:
    """One warning as plain data."""
    return {"kind": kind, "message": message}


def temp_doubts(name: str, temp_bytes: int, cache_bytes: int, stacks: Mapping[str, int]) -> list[dict[str, str]]:
    """Temporary bytes above those of the cache, or of the largest stack of weights: a copy of one of them, most
    likely."""
    largest = max(stacks, key=stacks.__getitem__)
    limits = {"the cache": cache_bytes, f"the largest stack of weights, {largest}": stacks[largest]}
    above = [f"{what} ({size:,} bytes)" for what, size in limits.items() if temp_bytes > size]
    if not above:
        return []
    message = f"{name}: {temp_bytes:,} temporary bytes are more than {' and more than '.join(above)}"
    return [doubt("temp", f"{message}; it may copy them in every step")]


def gathered_weight_doubts(
    name: str, collectives: Iterable[Mapping[str, Any]], weights: Mapping[str, Sequence[tuple[int, ...]]]
) -> list[dict[str, str]]:
    """All-gathers whose result has a weight's shape. weights: shapes that each would have, put together."""
    found = []
    for each in collectives:
        if each["kind"] != "all-gather":
            continue
        gathered = _dims(each["shape"])
        for path, shapes in weights.items():
            if gathered in [_sorted_dims(shape) for shape in shapes]:
                message = f"{name}: {each['shape']} is put together from all devices {each['count']} times a step"
                found.append(doubt("gathered_weight", f"{message}; {path} has this shape"))
                break
    return found


def _dims(shape: str) -> tuple[int, ...]:
    inside = shape.partition("[")[2].partition("]")[0]
    return _sorted_dims(map(int, inside.split(","))) if inside else ()


def _sorted_dims(shape: Iterable[int]) -> tuple[int, ...]:
    """Sizes without those of one, in falling order: layouts and reshapes may turn them."""
    return tuple(sorted((size for size in shape if size > 1), reverse=True))


def alias_doubts(name: str, alias_bytes: int, donated_bytes: int) -> list[dict[str, str]]:
    """Donated bytes that the results do not take over: they are copied. (A layout may make aliased ones larger.)"""
    if alias_bytes >= donated_bytes:
        return []
    message = f"{name}: of {donated_bytes:,} donated bytes of cache and state {alias_bytes:,} are updated in place"
    return [doubt("not_aliased", f"{message}; the others are copied in every step")]


def version_doubts(platform: str, num_devices: int, *, has_experts: bool, is_packed: bool) -> list[dict[str, str]]:
    """What this version does on these devices and a better one would not."""
    found = []
    if has_experts and platform != "tpu":
        message = f"this version has no grouped product of its own for {platform}: XLA multiplies every row with every"
        found.append(doubt("dense_experts", f"{message} expert of its device"))
    if is_packed:
        message = "XLA may write packed weights out in bfloat16 in every step; the bytes read count them packed"
        found.append(doubt("decoded_weights", message))
    if platform == "cpu" and num_devices == 1:
        message = "this is XLA's program; by default an engine on one CPU has kernels of its own for packed weights"
        found.append(doubt("other_kernels", message))
    return found
