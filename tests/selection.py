"""Selects the cases of a product for ``make test``; ``make test-all`` runs all of them."""

from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest


def every_pair(*columns: Sequence[Any]) -> list[Any]:
    """The product of three columns or more, with every second case slow: the others still contain
    any two values of different columns together."""
    assert len(columns) > 2
    return [
        pytest.param(*(value for _, value in case), marks=pytest.mark.slow if odd else ())
        for case in product(*map(enumerate, columns))
        for odd in [sum(index for index, _ in case) % 2]
    ]
