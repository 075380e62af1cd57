"""Kernels compiled once and kept in the clone, so that only the first run compiles."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
MACHINE_CODE = str(Path(__file__).parent / "machine_code")


@pytest.fixture(scope="session")
def kernel_cache() -> Path:
    return ROOT / ".cache" / "kernels"


@pytest.fixture(scope="session")
def probes(kernel_cache):
    """The targets of machine_code/ffi_probes.py; the child process finds them through this process' sys.path."""
    from pallas_kernels.cpu.targets import register

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [*sys.path, MACHINE_CODE])
        return register(["ffi_probes:scale", "ffi_probes:spin"], cache_dir=kernel_cache)


@pytest.fixture(scope="session")
def targets(kernel_cache):
    """The products of all formats, for this CPU."""
    from pallas_kernels.cpu.targets import register
    from pallas_kernels.quantized_matmul.cpu import function_of
    from pallas_kernels.quantized_matmul.tiles import TILE_FORMATS

    return register(map(function_of, TILE_FORMATS), cache_dir=kernel_cache)
