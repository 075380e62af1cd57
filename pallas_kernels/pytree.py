"""`pytree`: makes a frozen dataclass of arrays a pytree."""

from dataclasses import fields
from typing import Any

import jax


def pytree[T](cls: type[T]) -> type[T]:
    """Registers a dataclass with JAX; fields with metadata {"static": True} are part of the structure.

    Unlike jax.tree_util.register_dataclass, rebuilding skips __init__: JAX rebuilds trees with leaves of its own
    (ShapeDtypeStructs, stacked arrays, None), which need not have the shapes that the fields state.
    """
    leaves = tuple(f.name for f in fields(cls) if not f.metadata.get("static"))  # type: ignore[arg-type]
    static = tuple(f.name for f in fields(cls) if f.metadata.get("static"))  # type: ignore[arg-type]

    def flatten(tree: T) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        return tuple(getattr(tree, name) for name in leaves), tuple(getattr(tree, name) for name in static)

    def flatten_with_keys(tree: T) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        children, structure = flatten(tree)
        return tuple((jax.tree_util.GetAttrKey(n), c) for n, c in zip(leaves, children, strict=True)), structure

    def unflatten(structure: tuple[Any, ...], children: Any) -> T:
        tree = object.__new__(cls)
        for name, value in (*zip(static, structure, strict=True), *zip(leaves, children, strict=True)):
            object.__setattr__(tree, name, value)
        return tree

    jax.tree_util.register_pytree_with_keys(cls, flatten_with_keys, unflatten, flatten)
    return cls
