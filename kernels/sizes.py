"""Sizes of grids and blocks, on the host: Triton's own functions take a microsecond or more
each."""

from functools import cache
from itertools import accumulate
from operator import mul

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


def has_contiguous_blocks(cache: Tensor) -> bool:
    """True if ``cache[0]`` is contiguous."""
    return _is_contiguous(cache.shape[1:], cache.stride()[1:])


@cache
def _is_contiguous(sizes: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    wanted = [1, *accumulate(reversed(sizes), mul)][-2::-1]
    pairs = zip(sizes, strides, wanted, strict=True)
    return all(size == 1 or stride == expected for size, stride, expected in pairs)
