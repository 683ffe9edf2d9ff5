"""Which cases of a product run in ``make test``; all of them run in ``make test-all``."""

from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest


def every_pair(*columns: Sequence[Any]) -> list[Any]:
    """The product of three columns or more, of which every second case is slow: the others hold
    each two values of different columns together at least once."""
    assert len(columns) > 2
    return [
        pytest.param(*(value for _, value in case), marks=pytest.mark.slow if odd else ())
        for case in product(*map(enumerate, columns))
        for odd in [sum(index for index, _ in case) % 2]
    ]
