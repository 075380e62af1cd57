"""Compiles numba functions into object files. Runs in a child process of targets.py.

A process of its own keeps numba and its memory out of the server, and the LLVM options set here out of other users of
numba. Arguments: the CPU level, then for each function its module:attribute and the file to write. A line on stdout
follows each file.
"""

import importlib
import sys
from pathlib import Path
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir

from pallas_kernels.cpu.levels import Level, known_level
from pallas_kernels.cpu.native import ENTRY, target_machine
from pallas_kernels.cpu.object_files import write_object

# All that kernels may import. Anything from Python or numba's runtime is a mistake: it would mean an allocation, an
# exception or the GIL on an XLA thread.
C_SYMBOLS = frozenset({"snprintf", "malloc", "free", "memset", "memcpy", "memmove", "sched_yield"})
# Register tiles are loops over constant ranges: they only pay off fully unrolled.
UNROLL_THRESHOLD = 1500


class NotSelfContained(Exception):
    """The code would call Python, raise, or allocate through numba."""


def main(arguments: list[str]) -> None:
    """Writes the object files."""
    level = known_level(arguments[0])  # this CPU may lack it: nothing compiled here runs here
    compile_for(level)
    for function, path in zip(arguments[1::2], arguments[2::2], strict=True):
        module, attribute = function.split(":")
        object_code = object_code_of(getattr(importlib.import_module(module), attribute), level)
        write_object(Path(path), object_code)
        print(function, flush=True)


def compile_for(level: Level) -> None:
    """Sets the target of numba and the options of LLVM. Once in a process, before anything is compiled."""
    from numba.core import config

    config.CPU_NAME, config.CPU_FEATURES = level.cpu, level.feature_string  # type: ignore[attr-defined]
    config.OPT = config.OPT.__class__(1)  # type: ignore[attr-defined]  # the whole is optimized once, at the end
    # numba's own JIT must find the name, although nothing it links here ever runs.
    llvm.load_library_permanently("")
    llvm.add_symbol("raise_exception", llvm.address_of_symbol("abort"))
    llvm.set_option("kernels", f"-unroll-threshold={UNROLL_THRESHOLD}")


def object_code_of(function: Any, level: Level) -> bytes:
    """Machine code for a numba function int64 -> int64, with a C entry point named ENTRY. Raises NotSelfContained."""
    from numba import types
    from numba.core.compiler_lock import global_compiler_lock
    from numba.core.registry import cpu_target

    from pallas_kernels.cpu.memory import c_entry

    context: Any = cpu_target.target_context
    module = ir.Module("entry")
    with global_compiler_lock:
        library = context.codegen().create_library("kernel")
        function.compile((types.int64,))
        overload = function.overloads[(types.int64,)]
        library.add_linking_library(overload.library)
        c_entry(context, module, overload, ENTRY, linkage="external")
        library.add_ir_module(module)
        library.finalize()
    linked = llvm.parse_assembly(library.get_llvm_str())
    machine = target_machine(level)
    _optimize(linked, machine)
    _refuse_foreign_calls(linked)
    return machine.emit_object(linked)


def _optimize(module: Any, machine: Any) -> None:
    for function in module.functions:
        if not function.is_declaration and function.name != ENTRY:
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
