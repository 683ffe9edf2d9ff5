"""Launches that no GPU would run are errors on the simulated one, too."""

from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from benchmarks.gpu.dry_card import Launch, dry_card
from tests.kernels.compiled import needs_compiler

pytestmark = needs_compiler
NUMBERS = torch.zeros(8, dtype=torch.int32)


@triton.jit(do_not_specialize=["number"])
def _store(p_out, p_none, pair, number, share):
    tl.store(p_out, tl.load(pair[0]) + number)


def launched(
    *grid: int, out: Any = NUMBERS, pair: Any = (NUMBERS, None), number: int = 5, **options: Any
) -> list[Launch]:
    found: list[Launch] = []
    with dry_card(watch=found.append, compiles=bool(options)):
        _store[grid](out, None, pair, number, 0.1, **options)
    return found


@pytest.mark.parametrize("number", [5, -5, 2**40])
def test_arguments_arrive(number: int) -> None:
    (launch,) = launched(3, 2, number=number)
    assert launch.grid == (3, 2, 1)
    assert launch.arguments == {
        "p_out": NUMBERS,
        "p_none": None,
        "pair": (NUMBERS, None),
        "number": number,
        "share": 0.1,
    }


def test_compiled_kernels_are_loaded() -> None:
    (launch,) = launched(1, num_warps=2)
    assert launch.model.cubin
    assert launch.num_warps == 2


def test_nothing_is_launched_for_no_programs() -> None:
    assert launched(0) == []


@pytest.mark.parametrize(
    ("grid", "problem"),
    [((1, 1 << 16), "no GPU launches"), ((1 << 17, 1 << 14), "no GPU has a grid")],
)
def test_a_grid_is_too_large(grid: tuple[int, int], problem: str) -> None:
    with pytest.raises((RuntimeError, ValueError), match=problem):
        launched(*grid)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"out": NUMBERS[1:]}, "p_out does not begin"),
        ({"pair": (NUMBERS[1:], None)}, r"pair\[0\] does not begin"),
    ],
)
def test_a_pointer_is_not_aligned(arguments: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        launched(1, **arguments)
