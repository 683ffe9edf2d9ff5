"""Sizes of grids and blocks, on the host: Triton's own functions take a microsecond or more
each."""

from torch import Tensor, int64

ALIGNED = 4  # elements, 16 bytes or more: Triton compiles kernels anew for another alignment


def cdiv(size: int, unit: int) -> int:
    """⌈size / unit⌉"""
    return -(-size // unit)


def next_power_of_2(size: int) -> int:
    """The lowest power of 2 ≥ ``size`` ≥ 1."""
    return 1 << (size - 1).bit_length()


def empty_rows(num_rows: int, length: int, like: Tensor) -> Tensor:
    """[num_rows, length] int64 on the device of ``like``; each row begins at an aligned place."""
    return like.new_empty(num_rows, cdiv(length, ALIGNED) * ALIGNED, dtype=int64)[:, :length]
