"""Machine code from an object file, with llvmlite alone: a warm start does not import numba."""

from typing import TYPE_CHECKING, Any

from pallas_kernels.cpu.levels import Level

if TYPE_CHECKING:
    from llvmlite.binding import TargetMachine

ENTRY = "entry"  # the symbol of every object file's function


def target_machine(level: Level) -> "TargetMachine":
    """LLVM's code generator for a level."""
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    return llvm.Target.from_triple(llvm.get_process_triple()).create_target_machine(
        cpu=level.cpu, features=level.feature_string, opt=3, codemodel="jitdefault", jit=True
    )


class NativeCode:
    """The executable code of an object file, mapped as long as this object lives. address: of its C entry point."""

    def __init__(self, object_code: bytes, level: Level):
        import llvmlite.binding as llvm

        self._engine: Any = llvm.create_mcjit_compiler(llvm.parse_assembly(""), target_machine(level))
        self._engine.add_object_file(llvm.ObjectFileRef.from_data(object_code))
        self._engine.finalize_object()
        self.address: int = self._engine.get_function_address(ENTRY)
        assert self.address, "the object file has no entry point"
