"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1), always in its absorbed form.

The cache holds one latent and one rotated key per token; the up-projections of keys and values are taken to the side of
queries and outputs, so that a step reads latents and not heads.
"""

from dataclasses import dataclass

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxserve.layers.linear import gathered, linear
from jaxserve.layers.norm import RmsNorm, rms_norm
from jaxserve.quant.quantized import Weight
from pallas_kernels.kernels import Kernels
from pallas_kernels.mla_attention.latent_pages import LatentPages
from pallas_kernels.paged_attention.rope import Angles, rotate
from pallas_kernels.ragged import RaggedLayout


@dataclass(frozen=True, kw_only=True)
class MlaSizes:
    """latent_size: C values kept per token; rope_size: R rotated ones beside them; nope_size, value_size: of a head.
    query_rank: width of the queries' own latent, None where they come from one projection."""

    latent_size: int
    rope_size: int
    nope_size: int
    value_size: int
    query_rank: int | None


def latent_attention(
    kernels: Kernels,
    x: Float[Array, "T D"],
    weights: dict,
    cache: LatentPages,
    layer: int | Array,
    layout: RaggedLayout,
    angles: Angles,
    sizes: MlaSizes,
    *,
    scale: float,
    norm: RmsNorm,
    residual: Float[Array, "T D"] | None = None,
) -> tuple[Float[Array, "T D"], LatentPages]:
    """o(attention of norm(x)) (+ residual), and the cache with this step's latents.

    weights: q [N(nope + R), D], or q_a, q_a_norm and q_b; kv_a [C + R, D], kv_a_norm; k_up [N, C, nope] and
    v_up [N, v, C]; o [D, N v]. Rotated parts stand in halves, not interleaved.
    """
    C, eps = sizes.latent_size, norm.eps
    if sizes.query_rank is None:
        q = linear(kernels, x, weights["q"], before=norm)
    else:
        low = linear(kernels, x, weights["q_a"], before=norm)
        q = linear(kernels, low, weights["q_b"], before=RmsNorm(weight=weights["q_a_norm"], eps=eps))
    kv = linear(kernels, x, weights["kv_a"], before=norm)
    latent = rms_norm(kv[:, :C], weights["kv_a_norm"], eps)
    rotated = rotate(kv[:, None, C:], angles)[:, 0]
    cache = kernels.write_latent(jnp.concatenate([latent, rotated], axis=-1), cache, layer, layout)
    q = q.reshape(x.shape[0], -1, sizes.nope_size + sizes.rope_size)
    absorbed = _of_each_head("tnh,nch->tnc", q[..., : sizes.nope_size], weights["k_up"])
    queries = jnp.concatenate([absorbed, rotate(q[..., sizes.nope_size :], angles)], axis=-1)
    out = kernels.mla_attention(queries, cache, layer, layout, scale=scale, latent_size=C).astype(x.dtype)
    values = _of_each_head("tnc,nvc->tnv", out, weights["v_up"])
    return gathered(kernels, values.reshape(x.shape[0], -1), weights["o"], residual=residual), cache


def _of_each_head(equation: str, x: Float[Array, "T N X"], weight: Weight) -> Float[Array, "T N Y"]:
    """The product of each head's values with its own matrix, summed in float32."""
    matrix = weight.decode().astype(x.dtype)
    out = jnp.einsum(equation, x, matrix, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)
    return out.astype(x.dtype)
