"""Running a model's layers one after another, unrolled or as a scan."""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

Carry = TypeVar("Carry")


def run_layers[Carry](layers: Any, carry: Carry, body: Callable[[Carry, Any, Any], Carry]) -> Carry:
    """carry after body(carry, weights of layer i, i) for each layer.

    A tuple of layers is unrolled: fastest on CPU, where a scan would copy every layer's weights out of the stack.
    Weights stacked on a leading axis (`stack_layers`) are scanned: one layer to compile, what accelerators want. The
    carry holds the cache, so that it is updated in place.
    """
    if isinstance(layers, tuple):
        one = jax.jit(body)  # traced and lowered once for all layers of a kind, not once per layer
        for index, weights in enumerate(layers):
            carry = one(carry, weights, jnp.int32(index))
        return carry

    def step(carry: Carry, weights_and_index: Any) -> tuple[Carry, None]:
        return body(carry, *weights_and_index), None

    num_layers = jax.tree.leaves(layers)[0].shape[0]
    return lax.scan(step, carry, (layers, jnp.arange(num_layers)))[0]


def stack_layers(layers: tuple[Any, ...]) -> Any:
    """The layers' weights stacked on a new leading axis. Raises ValueError when their formats or shapes differ."""
    kinds = {str(jax.tree.map(lambda a: (a.shape, str(a.dtype)), layer)) for layer in layers}
    if len(kinds) > 1:
        raise ValueError("layers of different formats or shapes cannot be stacked; run them unrolled")
    return jax.tree.map(lambda *arrays: jnp.stack(arrays), *layers)
