"""Running a model's layers one after another, unrolled or as scans."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int32

type Body[Carry] = Callable[[Carry, Any, Any], Carry]


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class StackedLayers:
    """Neighbouring layers of one form: each array of their weights on a new leading axis."""

    weights: Any

    @property
    def num_layers(self) -> int:
        return jax.tree.leaves(self.weights)[0].shape[0]


def run_layers[Carry](
    layers: tuple[Any, ...],
    carry: Carry,
    body: Body[Carry] | Sequence[Body[Carry]],
    numbers: Sequence[int] | None = None,
) -> Carry:
    """carry after body(carry, weights of layer i, i) for each layer; after body(carry, weights, numbers[i]) where
    numbers are given.

    A sequence of bodies has one for each layer, for models whose layers differ in more than their weights; layers of
    one kind must share one function, which is then traced once.

    Layers one by one are unrolled: fastest on CPU, where a scan would copy every layer's weights out of the stack.
    Stacked ones (`stack_layers`) are scanned, neighbours of one kind in one scan: few layers to compile, what
    accelerators want. The carry holds the cache, so that it is updated in place.
    """
    num_layers = sum(item.num_layers if isinstance(item, StackedLayers) else 1 for item in layers)
    bodies = tuple(body) if isinstance(body, Sequence) else (body,) * num_layers
    assert len(bodies) == num_layers, f"{len(bodies)} bodies for {num_layers} layers"
    numbers = range(num_layers) if numbers is None else numbers
    compiled = {kind: jax.jit(kind) for kind in bodies}  # traced and lowered once for all layers of a kind
    index = 0
    for item in layers:
        if not isinstance(item, StackedLayers):
            carry = compiled[bodies[index]](carry, item, jnp.int32(numbers[index]))
            index += 1
            continue
        first, index = index, index + item.num_layers
        for kind, run in groupby(range(first, index), key=bodies.__getitem__):
            indices = tuple(run)
            places = jnp.asarray([index - first for index in indices])
            carry = _scan(item.weights, carry, kind, places, jnp.asarray([numbers[i] for i in indices]))
    return carry


def _scan[Carry](
    stacked: Any, carry: Carry, body: Body[Carry], places: Int32[Array, "y"], numbers: Int32[Array, "y"]
) -> Carry:
    """carry after some of the stacked layers; each is taken out of the whole stack, which is not sliced into copies."""

    def step(carry: Carry, layer: tuple[Int32[Array, ""], Int32[Array, ""]]) -> tuple[Carry, None]:
        place, number = layer
        weights = jax.tree.map(lambda array: lax.dynamic_index_in_dim(array, place, keepdims=False), stacked)
        return body(carry, weights, number), None

    return lax.scan(step, carry, (places, numbers))[0]


def stack_layers(
    layers: tuple[Any, ...], stack: Callable[[Sequence[Any]], Any] = jnp.stack
) -> tuple[StackedLayers, ...]:
    """The layers with neighbours of the same formats and shapes stacked: one stack for most models.

    stack: makes one array of several; another one where they are only described.
    """

    def form(layer: Any) -> str:
        return str(jax.tree.map(lambda array: (array.shape, str(array.dtype)), layer))

    runs = [list(run) for _, run in groupby(layers, key=form)]
    return tuple(StackedLayers(weights=jax.tree.map(lambda *arrays: stack(arrays), *run)) for run in runs)
