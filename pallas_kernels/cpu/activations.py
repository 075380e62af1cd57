"""Vector arithmetic on float32 activations: exp, gated units, the scale of an RMS norm.

A relative error of about 2e-7. Each row's operations have one order, whatever the number of rows.
"""

import numpy as np

from pallas_kernels.cpu.memory import compiled
from pallas_kernels.cpu.simd import (
    f32,
    f32_bits,
    f32_of_bits,
    fma,
    hsum_f32,
    least_f32,
    load_f32,
    load_first_f32,
    shift_left_23,
    splat_f32,
    splat_i32,
    square_root,
)

_LOG2_E = np.float32(1.44269504)
_LN2_HIGH, _LN2_LOW = (
    np.float32(0.693359375),
    np.float32(-2.12194440e-4),
)  # the first has 9 bits: n * _LN2_HIGH is exact
_ROUND = np.float32(1.5 * 2**23)  # added to a small number, leaves its integer part in the lowest bits
_ROUND_BITS = np.int32(np.float32(1.5 * 2**23).view(np.int32))
_LEAST, _LARGEST = np.float32(-87.0), np.float32(89.0)  # of exp: 1.6e-38; infinity, as the exponent becomes 255
_EXPONENT_OF_ONE = np.int32(127)
# Taylor coefficients 1/6! to 1/2!; the remainder on |r| <= ln(2) / 2 is below 2e-7 of the result.
_C6, _C5, _C4, _C3, _C2 = (np.float32(1 / n) for n in (720, 120, 24, 6, 2))
_GELU_SLOPE, _GELU_CUBE = np.float32(1.5957691216), np.float32(0.0713548163)  # 2 sqrt(2/pi), and that times 0.044715


@compiled
def _exp(x):
    """exp(x) from _LEAST to 88; infinite to _LARGEST."""
    shifted = fma(x, splat_f32(_LOG2_E), splat_f32(_ROUND))
    n = shifted - splat_f32(_ROUND)
    r = fma(n, splat_f32(-_LN2_LOW), fma(n, splat_f32(-_LN2_HIGH), x))
    p = fma(splat_f32(_C6), r, splat_f32(_C5))
    p = fma(p, r, splat_f32(_C4))
    p = fma(p, r, splat_f32(_C3))
    p = fma(p, r, splat_f32(_C2))
    p = fma(p, r, splat_f32(f32(1.0)))
    p = fma(p, r, splat_f32(f32(1.0)))
    exponent = f32_bits(shifted) - splat_i32(_ROUND_BITS) + splat_i32(_EXPONENT_OF_ONE)
    return p * f32_of_bits(shift_left_23(exponent))


@compiled
def _over_one_plus_exp(x, negated):
    """x / (1 + exp(negated)); NaN stays NaN."""
    at_least = splat_f32(f32(0.0)) - least_f32(splat_f32(f32(0.0)) - negated, splat_f32(-_LEAST))
    return x / (splat_f32(f32(1.0)) + _exp(least_f32(at_least, splat_f32(_LARGEST))))


@compiled
def silu(x):
    """x * sigmoid(x)."""
    return _over_one_plus_exp(x, splat_f32(f32(0.0)) - x)


@compiled
def gelu_tanh(x):
    """0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))), which is x * sigmoid of twice that argument."""
    slope = fma(x * x, splat_f32(_GELU_CUBE), splat_f32(_GELU_SLOPE))
    return _over_one_plus_exp(x, splat_f32(f32(0.0)) - x * slope)


@compiled
def load_up_to(address, count):
    """The vector at `address`, of which only `count` lanes exist; zero in the others."""
    if count >= 16:
        return load_f32(address)
    return load_first_f32(address, max(count, 0))


@compiled
def inverse_rms(x, count, eps):
    """1 / sqrt(mean of the squares of `count` floats at x + eps)."""
    a, b = splat_f32(f32(0.0)), splat_f32(f32(0.0))
    for i in range(0, count, 32):
        first, second = load_up_to(x + 4 * i, count - i), load_up_to(x + 4 * i + 64, count - i - 16)
        a, b = fma(first, first, a), fma(second, second, b)
    return f32(1.0) / square_root(hsum_f32(a + b) / f32(count) + eps)
