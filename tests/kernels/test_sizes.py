"""Sizes of grids and blocks against their definitions."""

from hypothesis import given
from hypothesis import strategies as st

from kernels.sizes import cdiv, next_power_of_2


@given(st.integers(0, 2**40), st.integers(1, 2**20))
def test_so_many_units_hold_a_size_and_one_less_do_not(size: int, unit: int) -> None:
    num = cdiv(size, unit)
    assert num * unit >= size
    assert (num - 1) * unit < size


@given(st.integers(1, 2**40))
def test_the_next_power_of_two_is_the_lowest(size: int) -> None:
    power = next_power_of_2(size)
    assert power & (power - 1) == 0
    assert power // 2 < size <= power
