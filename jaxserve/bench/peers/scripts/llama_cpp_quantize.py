"""Writes a GGUF file in another format: `llama_cpp_quantize.py SOURCE TARGET Q4_0`. Packed weights are packed again."""

import ctypes
import sys

import llama_cpp  # pyright: ignore[reportMissingImports]


def main():
    """Exit code 0 when the file is written."""
    source, target, file_format = sys.argv[1:]
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{file_format}")
    params.allow_requantize = True
    return llama_cpp.llama_model_quantize(source.encode(), target.encode(), ctypes.byref(params))


if __name__ == "__main__":
    sys.exit(main())
