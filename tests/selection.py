"""Selects the cases of a product for ``make test``; ``make test-all`` runs all of them."""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import combinations, product
from typing import Any, TypeVar

import pytest

Case = TypeVar("Case", bound=tuple[Any, ...])
Group = tuple[tuple[int, Any], ...]


def every_pair(*columns: Sequence[Any]) -> list[Any]:
    """The product of three columns or more. Few of its cases are not slow; they contain any two
    values of different columns together."""
    assert len(columns) > 2
    places = [*product(*map(range, map(len, columns)))]
    chosen = [
        tuple(column[place] for column, place in zip(columns, case, strict=True))
        for case in cover(places)
    ]
    return only(chosen, *columns)


def only(chosen: Collection[tuple[Any, ...]], *columns: Iterable[Any]) -> list[Any]:
    """The product of columns. The cases that are not ``chosen`` are slow."""
    return [
        pytest.param(*case, marks=() if case in chosen else pytest.mark.slow)
        for case in product(*columns)
    ]


def cover(cases: Sequence[Case], size: int = 2) -> list[Case]:
    """Few of ``cases`` with all groups of ``size`` values that occur in them, in the order of
    ``cases``, always the same ones.

    Each next case has the most groups that no earlier one has, and else the rarest ones.
    """
    chosen, uses = list[Case](), Counter[Group]()

    def worth(case: Case) -> tuple[int, int]:
        counts = [uses[group] for group in groups_of(case, size)]
        return counts.count(0), -sum(counts)

    num_groups = len({group for case in cases for group in groups_of(case, size)})
    while len(uses) < num_groups:
        chosen.append(max(cases, key=worth))
        uses.update(groups_of(chosen[-1], size))
    return sorted(chosen, key=cases.index)


def groups_of(case: tuple[Any, ...], size: int) -> Iterator[Group]:
    """Values with their places in ``case``."""
    return combinations(enumerate(case), size)
