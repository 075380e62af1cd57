"""Weights to test kernels with, in every format that has tiles."""

import ml_dtypes
import numpy as np

from pallas_kernels.quantized_matmul.tiles import tile_format


def random_parts(
    rng: np.random.Generator, format_name: str, num_outputs: int, num_inputs: int, group_length: int | None = None
) -> dict[str, np.ndarray]:
    """Packed arrays as `tile` takes them, all bits random; floating-point scales are between -1 and 1.

    The first output's are subnormal in float16: alone in their sums, so that a kernel that takes them for zero is seen
    by its result."""
    fmt = tile_format(format_name)

    def whole(dtype: type, per_item: int, low: int | None = None, high: int | None = None) -> np.ndarray:
        low, high = np.iinfo(dtype).min if low is None else low, np.iinfo(dtype).max if high is None else high
        return rng.integers(low, high, (num_outputs, -(-num_inputs // per_item)), dtype, endpoint=True)

    def real(per_item: int) -> np.ndarray:
        values = rng.uniform(-1, 1, (num_outputs, -(-num_inputs // per_item))).astype(np.float16)
        values[0] = 2.0**-16
        return values

    match fmt.scales:
        case "none":
            values = rng.standard_normal((num_outputs, num_inputs), np.float32)
            return {"array": values.astype(getattr(ml_dtypes, fmt.dtype, fmt.dtype))}
        case "row":
            return {"quants": whole(np.int8, 1), "scale": real(num_inputs)[:, 0].astype(np.float32)}
        case "span":
            zero = whole(np.uint8, group_length or num_inputs, 0, 16)
            return {"quants": whole(np.uint8, 1, 0, 15), "scale": real(group_length or num_inputs), "zero": zero}
        case "super_block_halves":
            parts = {"low": whole(np.uint8, 2), "high": whole(np.uint8, 4)}
            return {**parts, "scales": whole(np.int8, 16), "d": real(256)}
        case "super_block_minimum":
            parts = {"quants": whole(np.uint8, 2), "scales": whole(np.uint8, 32, 0, 63)}
            parts |= {"mins": whole(np.uint8, 32, 0, 63), "d": real(256), "dmin": real(256)}
        case _:
            quants = whole(np.int8, 1) if fmt.bits == 8 else whole(np.uint8, 2)
            parts = {"quants": quants, "scale": real(32)}
            parts |= {"minimum": real(32)} if fmt.has_minimum else {}
    return {**parts, "high_bits": whole(np.uint8, 8)} if fmt.bits == 5 else parts
