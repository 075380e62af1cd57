"""abi.py against the C header of the installed jaxlib."""

import re
import shutil
import subprocess
from pathlib import Path

import jax
import pytest

from pallas_kernels.cpu import abi

HEADER = (Path(jax.ffi.include_dir()) / "xla/ffi/api/c_api.h").read_text()
SIZES = {"size_t": 8, "int64_t": 8, "int": 4, "int32_t": 4, "uint32_t": 4}
STRUCTS = {
    "Api_Version": abi.API_VERSION,
    "Args": abi.ARGS,
    "Rets": abi.RETS,
    "Attrs": abi.ATTRS,
    "CallFrame": abi.CALL_FRAME,
    "Buffer": abi.BUFFER_STRUCT,
    "Scalar": abi.SCALAR_STRUCT,
    "ByteSpan": abi.BYTE_SPAN,
    "InternalExtension": abi.INTERNAL_EXTENSION,
    "Metadata_Extension": abi.METADATA_EXTENSION,
    "Metadata": abi.METADATA,
    "Error_Create_Args": abi.ERROR_CREATE_ARGS,
    "Error_Destroy_Args": abi.ERROR_DESTROY_ARGS,
    "ThreadPool_Schedule_Args": abi.SCHEDULE_ARGS,
    "ThreadPool_NumThreads_Args": abi.NUM_THREADS_ARGS,
    "Api": abi.API,
}
CONSTANTS = {
    "Extension_Metadata": abi.EXTENSION_METADATA,
    "ExecutionStage_EXECUTE": abi.STAGE_EXECUTE,
    "ArgType_BUFFER": abi.BUFFER,
    "RetType_BUFFER": abi.BUFFER,
    "AttrType_SCALAR": abi.SCALAR,
    "Error_Code_INVALID_ARGUMENT": abi.INVALID_ARGUMENT,
    "Error_Code_INTERNAL": abi.INTERNAL,
    "Error_Code_FAILED_PRECONDITION": abi.FAILED_PRECONDITION,
    "DataType_S8": abi.S8,
    "DataType_S32": abi.S32,
    "DataType_S64": abi.S64,
    "DataType_U8": abi.U8,
    "DataType_F16": abi.F16,
    "DataType_F32": abi.F32,
    "DataType_BF16": abi.BF16,
}


def _c_layout(struct: str) -> tuple[list[tuple[str, int, int]], int]:
    """(name, offset, size) of the fields of XLA_FFI_<struct>, and its total size, by C's rules."""
    found = re.search(rf"struct XLA_FFI_{struct} {{(.*?)\n}}", HEADER, re.DOTALL)
    assert found, struct
    body = re.sub(r"//[^\n]*", "", found.group(1))
    body = re.sub(r"_XLA_FFI_API_STRUCT_FIELD\(XLA_FFI_(\w+)\)", r"void* \1", body)
    fields, offset, widest = [], 0, 1
    for declaration in filter(None, map(str.strip, body.split(";"))):
        parts = re.fullmatch(r"(.*?)\b(\w+)", declaration, re.DOTALL)
        assert parts, declaration
        size, align = _size_and_align(parts.group(1).replace("const", "").replace("struct ", "").strip())
        offset = -(-offset // align) * align
        fields.append((parts.group(2), offset, size))
        offset, widest = offset + size, max(widest, align)
    return fields, -(-offset // widest) * widest


def _size_and_align(c_type: str) -> tuple[int, int]:
    if c_type.endswith("*"):
        return 8, 8
    if c_type in SIZES:
        return SIZES[c_type], SIZES[c_type]
    inner = c_type.removeprefix("XLA_FFI_")
    is_struct = f"struct XLA_FFI_{inner} {{" in HEADER
    return (_c_layout(inner)[1], 8) if is_struct else (4, 4)  # else an enum or uint32_t flags


def test_the_version_is_verified():
    major, minor = (int(re.findall(rf"define XLA_FFI_API_{part} (\d+)", HEADER)[0]) for part in ("MAJOR", "MINOR"))
    assert major == abi.API_MAJOR
    assert minor <= abi.NEWEST_MINOR, "read the header's changes, then raise NEWEST_MINOR"


@pytest.mark.parametrize("struct", STRUCTS)
def test_layout(struct):
    ours = [(name, field[1], field[0].itemsize) for name, field in (STRUCTS[struct].fields or {}).items()]
    assert ours
    assert _c_layout(struct)[0][: len(ours)] == ours


@pytest.mark.parametrize("name", CONSTANTS)
def test_constant(name):
    assert [int(value) for value in re.findall(rf"XLA_FFI_{name} = (\d+)", HEADER)] == [CONSTANTS[name]]


@pytest.mark.skipif(not shutil.which("cc"), reason="needs a C compiler")
def test_layout_by_compiler(tmp_path):
    lines = ['#include "xla/ffi/api/c_api.h"']
    for struct, dtype in STRUCTS.items():
        for name, field in (dtype.fields or {}).items():
            c_name = f"XLA_FFI_{name}" if struct == "Api" and name[0].isupper() else name
            lines.append(f'_Static_assert(offsetof(struct XLA_FFI_{struct}, {c_name}) == {field[1]}, "");')
    (tmp_path / "layout.c").write_text("\n".join(lines) + "\n")
    subprocess.run(["cc", "-fsyntax-only", "-I", jax.ffi.include_dir(), tmp_path / "layout.c"], check=True)
