"""Sizes of grids and blocks, for functions that launch kernels: Triton's own take a microsecond or
more on the host, several times a launch."""


def cdiv(size: int, unit: int) -> int:
    """How many units hold ``size``."""
    return -(-size // unit)


def next_power_of_2(size: int) -> int:
    """The lowest that is no less than ``size``, which is 1 or more."""
    return 1 << (size - 1).bit_length()
