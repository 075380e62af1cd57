"""The paged cache of latents of one model: the argument that the backends of MLA share."""

from dataclasses import dataclass
from typing import Any

from pallas_kernels.pytree import pytree


@pytree
@dataclass(frozen=True, kw_only=True)
class LatentPages:
    """What all Y layers keep of each token, in P pages of L tokens: C values of latent, then R of its rotated part.

    latent: a jax array [Y, P, L, C + R] of float32 or bfloat16; rows may be longer, which adds zeros to them.
    """

    latent: Any
