"""Kernels for CPUs: written in Python, compiled by numba in child processes, called by XLA through its FFI.

levels.py, keys.py, native.py, object_files.py, prebuilt.py, build.py and targets.py run in the serving process and need
llvmlite only. The other modules describe machine code; they import numba and are imported by the compiling child
(compiler.py) alone.
"""
