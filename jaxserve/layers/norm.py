"""Normalization layers; the definition stands with the kernels that fuse it."""

from pallas_kernels.quantized_matmul.around import RmsNorm, rms_norm

__all__ = ["RmsNorm", "rms_norm"]
