"""Sizes of grids and blocks, on the host: Triton's own functions take a microsecond or more
each."""


def cdiv(size: int, unit: int) -> int:
    """⌈size / unit⌉"""
    return -(-size // unit)


def next_power_of_2(size: int) -> int:
    """The lowest power of 2 ≥ ``size`` ≥ 1."""
    return 1 << (size - 1).bit_length()
