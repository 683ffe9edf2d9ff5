"""Memory in huge pages, where the kernel gives them.

A core that reads weights and keys from all over finds each page by a walk through tables: with
pages of 4 KiB that takes longer than the reading (``docs/decisions/013-native-cpu-code.md``).
"""

import math
import mmap
from contextlib import suppress

import numpy as np
import torch
from torch import Tensor

HUGE_PAGE = 2 << 20
REGION = 32 << 20
ALIGNMENT = 64


def huge_zeros(num_bytes: int) -> Tensor:
    """[num_bytes] uint8, zeroed when it is first touched."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS  # shared memory has no huge pages by default
    region = mmap.mmap(-1, num_bytes + HUGE_PAGE, flags)
    with suppress(OSError):  # of a kernel that has none
        region.madvise(mmap.MADV_HUGEPAGE)
    array = np.frombuffer(region, np.uint8)
    start = -array.ctypes.data % HUGE_PAGE
    return torch.from_numpy(array[start : start + num_bytes])


class Arena:
    """Tensors one behind the other, so that small ones are in huge pages too."""

    def __init__(self) -> None:
        self._rest = torch.empty(0, dtype=torch.uint8)

    def empty(self, size: int, dtype: torch.dtype) -> Tensor:
        """[size]"""
        num_bytes = size * dtype.itemsize
        if len(self._rest) < num_bytes:
            self._rest = huge_zeros(max(num_bytes, REGION))
        taken = self._rest[:num_bytes].view(dtype)
        self._rest = self._rest[math.ceil(num_bytes / ALIGNMENT) * ALIGNMENT :]
        return taken
