"""What no kernel may do. Imported by the compiler only."""

import numpy as np

from pallas_kernels.cpu.memory import compiled


@compiled
def raises(x):
    """Raises for some arguments."""
    if x < 0:
        raise ValueError("negative")
    return x


@compiled
def allocates(x):
    """Takes memory from numba's runtime."""
    return np.arange(x).sum()
