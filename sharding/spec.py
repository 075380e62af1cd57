"""`ArraySpec`: an array as metadata. Weight trees exist in this form first; loading and sharding follow from it."""

import math
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ArraySpec:
    """Shape, dtype name and one logical axis name (of axes.py) per dimension."""

    shape: tuple[int, ...]
    axes: tuple[str, ...]
    dtype: str = "float32"

    def __post_init__(self) -> None:
        assert len(self.shape) == len(self.axes), f"{len(self.axes)} axes for shape {self.shape}"

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def is_vector(self) -> bool:
        """Whether it is a vector, or one for each expert (biases, a router): kept in float32 whatever the file has."""
        return len([axis for axis in self.axes if axis not in ("experts", "choices")]) <= 1


def paths(tree: object, prefix: str = "") -> dict[str, ArraySpec]:
    """Every spec of a tree of dicts and tuples under its dotted path, e.g. "layers.3.attention.q"."""
    if isinstance(tree, ArraySpec):
        return {prefix: tree}
    items = tree.items() if isinstance(tree, dict) else enumerate(tree)  # type: ignore[arg-type, var-annotated]
    found: dict[str, ArraySpec] = {}
    for key, value in items:
        found |= paths(value, f"{prefix}.{key}" if prefix else str(key))
    return found


def map_specs(tree: object, leaves: dict[str, object], prefix: str = "") -> object:
    """The same tree with each spec replaced by the leaf of its path."""
    if isinstance(tree, ArraySpec):
        return leaves[prefix]

    def below(key: object, value: object) -> object:
        return map_specs(value, leaves, f"{prefix}.{key}" if prefix else str(key))

    if isinstance(tree, dict):
        return {key: below(key, value) for key, value in tree.items()}
    assert isinstance(tree, tuple), f"a spec tree holds dicts, tuples and specs, not {type(tree)}"
    return tuple(below(i, value) for i, value in enumerate(tree))
