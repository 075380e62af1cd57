"""Compiles numba functions into one object file. Runs in a child process.

A process of its own keeps numba and its memory out of the server, and the LLVM options set here out of other users of
numba. Arguments: the parent's sys.path as JSON (targets.py puts it in place), the level, the symbol, the function as
module:attribute, the output file.
"""

import importlib
import sys
from pathlib import Path
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir

from pallas_kernels.cpu.levels import Level, level_named
from pallas_kernels.cpu.native import target_machine

# All that kernels may import. Anything from Python or numba's runtime is a mistake: it would mean an allocation, an
# exception or the GIL on an XLA thread.
C_SYMBOLS = frozenset({"snprintf", "malloc", "free", "memset", "memcpy", "memmove", "sched_yield"})
# Register tiles are loops over constant ranges: they only pay off fully unrolled.
UNROLL_THRESHOLD = 1500


class NotSelfContained(Exception):
    """The code would call Python, raise, or allocate through numba."""


def main(arguments: list[str]) -> None:
    """Writes the object file."""
    level_name, symbol, function, out = arguments
    level = level_named(level_name)
    compile_for(level)
    module, attribute = function.split(":")
    object_code = object_code_of({symbol: getattr(importlib.import_module(module), attribute)}, level)
    Path(out).write_bytes(object_code)


def compile_for(level: Level) -> None:
    """Sets numba's target. Before any function is compiled: numba reads these once."""
    from numba.core import config

    config.CPU_NAME, config.CPU_FEATURES = level.cpu, level.feature_string  # type: ignore[attr-defined]
    config.OPT = config.OPT.__class__(1)  # type: ignore[attr-defined]  # the whole is optimized once, at the end


def object_code_of(functions: dict[str, Any], level: Level) -> bytes:
    """Machine code for {symbol: numba function int64 -> int64}, with C entry points of those names.

    Raises NotSelfContained.
    """
    from numba import types
    from numba.core.compiler_lock import global_compiler_lock
    from numba.core.registry import cpu_target

    from pallas_kernels.cpu.memory import c_entry

    # numba's own JIT must find the name, although nothing it links here ever runs.
    llvm.add_symbol("raise_exception", llvm.address_of_symbol("abort"))
    llvm.set_option("kernels", f"-unroll-threshold={UNROLL_THRESHOLD}")
    context = cpu_target.target_context
    module = ir.Module("entries")
    with global_compiler_lock:
        library = context.codegen().create_library("kernels")
        for symbol, function in functions.items():
            function.compile((types.int64,))
            overload = function.overloads[(types.int64,)]
            library.add_linking_library(overload.library)
            c_entry(context, module, overload, symbol, linkage="external")
        library.add_ir_module(module)
        library.finalize()
    linked = llvm.parse_assembly(library.get_llvm_str())
    machine = target_machine(level)
    _optimize(linked, machine, keep=set(functions))
    _refuse_foreign_calls(linked)
    return machine.emit_object(linked)


def _optimize(module: Any, machine: Any, *, keep: set[str]) -> None:
    for function in module.functions:
        if not function.is_declaration and function.name not in keep:
            function.linkage = "internal"
    options = llvm.create_pipeline_tuning_options(speed_level=3)
    builder = llvm.create_pass_builder(machine, options)
    builder.getModulePassManager().run(module, builder)


def _refuse_foreign_calls(module: Any) -> None:
    undefined = {f.name for f in module.functions if f.is_declaration}
    foreign = {name for name in undefined if not name.startswith("llvm.")} - C_SYMBOLS
    if foreign:
        raise NotSelfContained(f"the code calls {', '.join(sorted(foreign))}; kernels may call C only")


if __name__ == "__main__":
    main(sys.argv[1:])
