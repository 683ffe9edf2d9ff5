"""Memory in huge pages, where the kernel provides them.

With pages of 4 KiB, address translation costs a core more time than scattered reads of weights and
keys themselves (``docs/decisions/013-native-cpu-code.md``).
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
    """[num_bytes] uint8, zeroed on first access."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS  # shared memory has no huge pages by default
    region = mmap.mmap(-1, num_bytes + HUGE_PAGE, flags)
    with suppress(OSError):  # the kernel may lack huge pages
        region.madvise(mmap.MADV_HUGEPAGE)
    array = np.frombuffer(region, np.uint8)
    start = -array.ctypes.data % HUGE_PAGE
    return torch.from_numpy(array[start : start + num_bytes])


class Arena:
    """Allocates tensors one after another, so that small ones lie in huge pages too."""

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
