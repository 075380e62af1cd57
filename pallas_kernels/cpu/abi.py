"""Layouts and constants of the XLA FFI C API (xla/ffi/api/c_api.h, 64-bit targets).

Structs are numpy dtypes, which numba reads in place. The tests compare everything here with the header shipped in the
installed jaxlib.
"""

from typing import Any

import numpy as np

# The newest API version these layouts were verified with. Within a major version XLA only appends fields to structs,
# and it refuses targets whose version it no longer supports.
API_MAJOR, NEWEST_MINOR = 0, 5
EXTENSION_METADATA, STAGE_EXECUTE, BUFFER, SCALAR = 1, 3, 1, 3
INVALID_ARGUMENT, FAILED_PRECONDITION, INTERNAL = 3, 9, 13  # XLA_FFI_Error_Code
S8, S32, S64, U8, F16, F32, BF16 = 2, 4, 5, 6, 10, 11, 16  # XLA_FFI_DataType


def _struct(**fields: Any) -> np.dtype:
    return np.dtype({"names": list(fields), "formats": list(fields.values())}, align=True)


_I32, _I64, _POINTER = np.int32, np.int64, np.int64
_HEAD = {"struct_size": _I64, "extension_start": _POINTER}

API_VERSION = _struct(**_HEAD, major_version=_I32, minor_version=_I32)
ARGS = _struct(**_HEAD, size=_I64, types=_POINTER, args=_POINTER)
RETS = _struct(**_HEAD, size=_I64, types=_POINTER, rets=_POINTER)
ATTRS = _struct(**_HEAD, size=_I64, types=_POINTER, names=_POINTER, attrs=_POINTER)
CALL_FRAME = _struct(**_HEAD, api=_POINTER, ctx=_POINTER, stage=_I32, args=ARGS, rets=RETS, attrs=ATTRS)
BUFFER_STRUCT = _struct(**_HEAD, dtype=_I32, data=_POINTER, rank=_I64, dims=_POINTER)
SCALAR_STRUCT = _struct(dtype=_I32, value=_POINTER)
BYTE_SPAN = _struct(ptr=_POINTER, len=_I64)
INTERNAL_EXTENSION = _struct(struct_size=_I64, type=_I32, next=_POINTER)
METADATA_EXTENSION = _struct(extension_base=INTERNAL_EXTENSION, metadata=_POINTER)
METADATA = _struct(struct_size=_I64, api_version=API_VERSION, traits=np.uint32, state_type_id=_I64)
ERROR_CREATE_ARGS = _struct(**_HEAD, message=_POINTER, errc=_I32)
ERROR_DESTROY_ARGS = _struct(**_HEAD, error=_POINTER)
SCHEDULE_ARGS = _struct(**_HEAD, ctx=_POINTER, task=_POINTER, data=_POINTER)
NUM_THREADS_ARGS = _struct(**_HEAD, ctx=_POINTER, num_threads=_POINTER)

# XLA_FFI_Api's function pointers, in order, up to the last one used here.
_FUNCTIONS = (
    "Error_Create",
    "Error_GetDetails",
    "Error_Destroy",
    "Handler_Register",
    "Stream_Get",
    "Type_Register",
    "InvokeContext_Get",
    "State_Set",
    "State_Get",
    "DeviceMemory_Allocate",
    "DeviceMemory_Free",
    "ThreadPool_Schedule",
    "ThreadPool_NumThreads",
)
API = _struct(**_HEAD, api_version=API_VERSION, internal_api=_POINTER, **dict.fromkeys(_FUNCTIONS, _POINTER))


def size_in_c(struct: np.dtype) -> int:
    """STRUCT_SIZE as the header defines it: without tail padding."""
    assert struct.fields is not None
    return max(field[1] + field[0].itemsize for field in struct.fields.values())
