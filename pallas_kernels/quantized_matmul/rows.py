"""How activations lie in the kernel's workspace, and what both sides of its call agree on.

A row becomes one record for each block of 32 inputs: 32 int8, the float32 step, then one word, or two, with which the
products of the block begin (see `TileFormat.num_sums`). Formats that are not quantized keep 32 float32. Rows are taken
in tiles of up to 8; in a tile the records of a block lie side by side, row after row, so that the kernel reads them in
order. The last tile may have more rows than there are.
"""

from pallas_kernels.quantized_matmul.tiles import BLOCK_LENGTH, TileFormat, num_blocks_of

EXTRA_ROWS = 2  # at most, in the last tile
JOB_BYTES = 240  # of what the machine code keeps about a call or, of a grouped product, an expert
# The attribute `before` of a call.
NO_BEFORE, RMS_NORM, SILU, GELU_TANH = range(4)


def record_bytes(fmt: TileFormat) -> int:
    """Of one row and block."""
    return BLOCK_LENGTH + 4 + 4 * fmt.num_sums if fmt.is_quantized else 4 * BLOCK_LENGTH


def workspace_bytes(fmt: TileFormat, num_rows: int, num_inputs: int, num_experts: int = 1) -> int:
    """Of a call."""
    return (num_rows + num_experts * EXTRA_ROWS) * num_blocks_of(num_inputs) * record_bytes(fmt)
