"""Gumbel noise for a draw: a fixed function of (seed, position, token id), the same on every call and in every batch.

There is no generator state. The noise of one token is computed without that of the others, so that a drafter or a
verifier can ask for a few ids only and see the bits that the full draw sees.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32, Int32, UInt32

_LARGEST_BELOW_ONE = 1.0 - 2.0**-24
_BITS_OF_SQRT_HALF = 0x3F3504F3
_LOG_2_HIGH = 0.693359375  # few enough bits that its product with an exponent is exact
_LOG_2_LOW = -2.12194440e-4
# Least-squares fit of (log1p(f) - f + f**2 / 2) / f**3 over that range, lowest power first; the logarithm's relative
# error from it is under 1e-8, a tenth of float32's.
_LOG_TAIL = (
    *(0.333333552, -0.250008523, 0.199998274, -0.166213706),
    *(0.142271116, -0.132020965, 0.126203358, -0.0736289471),
)


@jax.jit
def gumbel(
    seed: UInt32[Array, "R 2"], positions: Int32[Array, "R"], token_ids: Int32[Array, "R N"]
) -> Float32[Array, "R N"]:
    """Standard Gumbel noise for the given ids of each row; argmax(logits + noise) is a draw from softmax(logits).

    G = -log(E) with E = -log1p(-u) exponential and u = hash / 2**32. Large G, the side that decides the draw, comes
    from small u, where float32 has its resolution: G is in [-2.82, 22.9]. Compiled even when called alone: op by op,
    products would round before the sums, and the last bit would differ from the step's.
    """
    first_key, second_key = _row_keys(seed, positions)
    ids = jax.lax.bitcast_convert_type(token_ids, jnp.uint32)
    bits = _wellons(_murmur(ids ^ first_key[:, None]) ^ second_key[:, None])
    uniform = (bits.astype(jnp.float32) + 0.5) * 2.0**-32
    # The largest hashes round to 1, whose noise would be -inf: a token that must be drawn could then not be.
    uniform = jnp.minimum(uniform, _LARGEST_BELOW_ONE)
    return -_log(_exponential(uniform))


def _exponential(uniform: Float32[Array, "R N"]) -> Float32[Array, "R N"]:
    """-log1p(-u) for u in (0, 1)."""
    exponent, excess = _split(1.0 - uniform)
    # Without a power of two to take out, the excess is -u itself, and 1 - u has already rounded it.
    excess = jnp.where(exponent == 0.0, -uniform, excess)
    return -_log_of_split(exponent, excess)


def _log(x: Float32[Array, "R N"]) -> Float32[Array, "R N"]:
    """The natural logarithm of normal positive numbers, in the same bits whatever the array's shape.

    XLA's own differs in the last bit between a vectorized loop and the remainder after it, so that the noise of a
    token would depend on how many others are computed beside it.
    """
    return _log_of_split(*_split(x))


def _split(x: Float32[Array, "R N"]) -> tuple[Float32[Array, "R N"], Float32[Array, "R N"]]:
    """(e, f) with x = 2**e * (1 + f) and 1 + f between sqrt(1/2) and sqrt(2)."""
    bits = jax.lax.bitcast_convert_type(x, jnp.int32)
    exponent = (bits - _BITS_OF_SQRT_HALF) >> 23
    mantissa = jax.lax.bitcast_convert_type(bits - (exponent << 23), jnp.float32)
    return exponent.astype(jnp.float32), mantissa - 1.0


def _log_of_split(exponent: Float32[Array, "R N"], excess: Float32[Array, "R N"]) -> Float32[Array, "R N"]:
    """e * log(2) + log1p(f), by log1p(f) = f - f**2 / 2 + f**3 * polynomial(f)."""
    tail = jnp.full_like(excess, _LOG_TAIL[-1])
    for coefficient in reversed(_LOG_TAIL[:-1]):
        tail = tail * excess + coefficient
    square = excess * excess
    small = excess * square * tail - 0.5 * square + exponent * _LOG_2_LOW
    return exponent * _LOG_2_HIGH + (excess + small)


def _row_keys(
    seed: UInt32[Array, "R 2"], positions: Int32[Array, "R"]
) -> tuple[UInt32[Array, "R"], UInt32[Array, "R"]]:
    """Two well mixed 32-bit keys of (seed, position); the constants only make the four inputs' roles differ."""
    low, high = seed[:, 0], seed[:, 1]
    at = jax.lax.bitcast_convert_type(positions, jnp.uint32)
    left = _murmur(low ^ _wellons(high + jnp.uint32(0x9E3779B9)))
    right = _wellons(high ^ _murmur(low + jnp.uint32(0x7F4A7C15)))
    first_key = _murmur(left ^ _wellons(at + jnp.uint32(0xBB67AE85)))
    second_key = _wellons(right ^ _murmur(at + jnp.uint32(0x3C6EF372)))
    return first_key, second_key


def _murmur(h: UInt32[Array, "..."]) -> UInt32[Array, "..."]:
    """MurmurHash3's 32-bit finalizer (Appleby): a bijection of the 32-bit integers that flips half of the bits."""
    h = (h ^ (h >> jnp.uint32(16))) * jnp.uint32(0x85EBCA6B)
    h = (h ^ (h >> jnp.uint32(13))) * jnp.uint32(0xC2B2AE35)
    return h ^ (h >> jnp.uint32(16))


def _wellons(h: UInt32[Array, "..."]) -> UInt32[Array, "..."]:
    """The lowbias32 finalizer (Wellons): a second, independently found bijection of the same form."""
    h = (h ^ (h >> jnp.uint32(16))) * jnp.uint32(0x7FEB352D)
    h = (h ^ (h >> jnp.uint32(15))) * jnp.uint32(0x846CA68B)
    return h ^ (h >> jnp.uint32(16))
