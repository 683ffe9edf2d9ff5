"""Types of the native library's arguments, and the addresses of arrays."""

import ctypes
from typing import Any

import numpy as np
from torch import Tensor

Pointer = ctypes.c_void_p
Int = ctypes.c_int32
Float = ctypes.c_float


def place(struct: ctypes.Structure | None) -> int | None:
    """The caller must keep the structure alive."""
    return None if struct is None else ctypes.addressof(struct)


def address(tensor: Tensor | None) -> Any:
    """Raises ValueError for memory that native code cannot read."""
    if tensor is not None and tensor.device.type != "cpu":
        raise ValueError(f"native code takes CPU tensors, not one on {tensor.device}")
    return None if tensor is None else Pointer(tensor.data_ptr())


def array_address(array: np.ndarray) -> Any:
    if array.dtype != np.int64 or not array.flags.c_contiguous:
        raise ValueError(f"native code takes contiguous int64 arrays, not {array.dtype}")
    return Pointer(array.ctypes.data)
