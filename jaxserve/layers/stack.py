"""Running a model's layers one after another, unrolled or as a scan."""

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int32

type Body[Carry] = Callable[[Carry, Any, Any], Carry]


def run_layers[Carry](layers: Any, carry: Carry, body: Body[Carry] | Sequence[Body[Carry]]) -> Carry:
    """carry after body(carry, weights of layer i, i) for each layer.

    A sequence of bodies has one for each layer, for models whose layers differ in more than their weights; layers of
    one kind must share one function, which is then traced once.

    A tuple of layers is unrolled: fastest on CPU, where a scan would copy every layer's weights out of the stack.
    Weights stacked on a leading axis (`stack_layers`) are scanned, neighbours of one kind in one scan: few layers to
    compile, what accelerators want. The carry holds the cache, so that it is updated in place.
    """
    num_layers = len(layers) if isinstance(layers, tuple) else jax.tree.leaves(layers)[0].shape[0]
    bodies = tuple(body) if isinstance(body, Sequence) else (body,) * num_layers
    assert len(bodies) == num_layers, f"{len(bodies)} bodies for {num_layers} layers"
    if isinstance(layers, tuple):
        compiled = {kind: jax.jit(kind) for kind in bodies}  # traced and lowered once for all layers of a kind
        for index, (weights, kind) in enumerate(zip(layers, bodies, strict=True)):
            carry = compiled[kind](carry, weights, jnp.int32(index))
        return carry
    for kind, run in groupby(range(num_layers), key=bodies.__getitem__):
        carry = _scan(layers, carry, kind, jnp.asarray(tuple(run)))
    return carry


def _scan[Carry](stacked: Any, carry: Carry, body: Body[Carry], indices: Int32[Array, "y"]) -> Carry:
    """carry after some of the stacked layers; each is taken out of the whole stack, which is not sliced into copies."""

    def step(carry: Carry, index: Int32[Array, ""]) -> tuple[Carry, None]:
        weights = jax.tree.map(lambda array: lax.dynamic_index_in_dim(array, index, keepdims=False), stacked)
        return body(carry, weights, index), None

    return lax.scan(step, carry, indices)[0]


def stack_layers(layers: tuple[Any, ...]) -> Any:
    """The layers' weights stacked on a new leading axis. Raises ValueError when their formats or shapes differ."""
    kinds = {str(jax.tree.map(lambda a: (a.shape, str(a.dtype)), layer)) for layer in layers}
    if len(kinds) > 1:
        raise ValueError("layers of different formats or shapes cannot be stacked; run them unrolled")
    return jax.tree.map(lambda *arrays: jnp.stack(arrays), *layers)
