"""Weight formats: a pytree of packed arrays for each, what its values are, and how to multiply with it."""
