"""Selects the cases of a product for ``make test``; ``make test-all`` runs all of them."""

from collections.abc import Sequence
from itertools import combinations, product
from typing import Any

import pytest

Case = tuple[int, ...]
"""An index into each column."""


def every_pair(*columns: Sequence[Any]) -> list[Any]:
    """The product of three columns or more. Few of its cases are not slow; they contain any two
    values of different columns together."""
    assert len(columns) > 2
    cases = [*product(*map(range, map(len, columns)))]
    chosen = cover(cases)
    return [
        pytest.param(
            *(column[index] for column, index in zip(columns, case, strict=True)),
            marks=() if case in chosen else pytest.mark.slow,
        )
        for case in cases
    ]


def cover(cases: Sequence[Case]) -> set[Case]:
    """Cases with all pairs of values that occur in ``cases``, found greedily: the next case is the
    first of those with the most pairs that are missing."""
    pairs = {case: {*combinations(enumerate(case), 2)} for case in cases}
    missing = set().union(*pairs.values())
    chosen = set()
    while missing:
        best = max(cases, key=lambda case: len(pairs[case] & missing))
        chosen.add(best)
        missing -= pairs[best]
    return chosen
