"""Arrays of the host on the devices of one host or of several."""

from typing import Any

import jax
import numpy as np


def put(tree: Any, sharding: jax.sharding.Sharding | None) -> Any:
    """The arrays of a tree, the same on every host, in a sharding; None: on the default device.

    Over several hosts `jax.device_put` would first ask all of them whether they mean the same.
    """
    if sharding is None or sharding.is_fully_addressable:
        return jax.device_put(tree, sharding)

    def placed(array: Any) -> jax.Array:
        values = np.asarray(array)
        return jax.make_array_from_callback(values.shape, sharding, lambda index: values[index])

    return jax.tree.map(placed, tree)
