"""Each cell of docs/exactness.md is as exact as the page says, neither less nor more."""

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import pytest

from tests.exactness.cells import DIMENSIONS, Cell, covering_cells
from tests.exactness.columns import COLUMNS, EVERY, REFUSED, Column
from tests.exactness.rules import Promise, rule_of
from tests.exactness.runs import Runs
from tests.selection import cover

QUICK = {EVERY.name, *(column.name for column in REFUSED if column.processes == "one")}
"""The columns of ``make test``."""
FEW = {*cover(covering_cells(), 1)}
"""The cells of ``make test`` in a column that has all: each value once."""
SERVED = [column for column in COLUMNS if column not in REFUSED]


def params_of(column: Column, *cells: Cell) -> Any:
    """``cells`` are one or none."""
    is_quick = column.name in QUICK and (column is not EVERY or {*cells} <= FEW)
    name = ": ".join([column.name, *map(str, cells)])
    return pytest.param(column, *cells, id=name, marks=() if is_quick else pytest.mark.slow)


each_column = pytest.mark.parametrize("runs", SERVED, ids=lambda each: each.name, indirect=True)


@pytest.fixture(scope="module")
def runs_of(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A column's runs, always the same ones."""
    folders = tmp_path_factory.mktemp("exactness")
    return cache(lambda name: Runs(next(each for each in COLUMNS if each.name == name), folders))


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, runs_of: Any) -> Iterator[Runs]:
    """Engines end with the last test of a column; outputs stay for other tests."""
    found: Runs = runs_of(request.param.name)
    yield found
    found.close()


@pytest.mark.parametrize(
    ("runs", "cell"),
    [params_of(column, cell) for column in COLUMNS for cell in column.cells()],
    indirect=["runs"],
)
def test_a_cell_is_as_exact_as_the_page_says(runs: Runs, cell: Cell) -> None:
    rule, found = rule_of(runs.column, cell), runs.finding(cell)
    place = f"{runs.column.name}: {cell}: "
    if rule.promise is Promise.REFUSED:
        assert found.refusal is not None, f"{place}it is not refused"
        assert found.refusal.startswith(rule.words), f"{place}{found.refusal}"
        return
    assert found.refusal is None, f"{place}{found.refusal}"
    if rule.promise is Promise.SAME_BITS:
        assert found.difference is None, f"{place}{found.difference}"
    elif found.difference is not None:
        size = found.difference.size
        assert size <= rule.tolerance, f"{place}{found.difference}, not {rule.tolerance:g}"


@pytest.mark.slow
@each_column
def test_a_column_is_no_more_exact_than_the_page_says(runs: Runs) -> None:
    """A single cell may have the same bits by chance, not all cells."""
    rounded = cells_of(runs, {Promise.TO_ROUNDING})
    differences = [runs.finding(cell).difference for cell in rounded]
    assert any(differences) or not rounded, f"{runs.column.name}: the same bits in {rounded}"


@pytest.mark.slow
@each_column
def test_some_drafts_are_accepted_and_some_are_not(runs: Runs) -> None:
    cells = cells_of(runs, {Promise.SAME_BITS, Promise.TO_ROUNDING})
    for speculation in DIMENSIONS["speculation"]:
        outputs = [runs.output(cell) for cell in cells if cell.speculation == speculation]
        num_drafts = sum(output.num_drafts for output in outputs)
        if speculation == "plain" or not outputs:
            assert num_drafts == 0
        else:
            assert 0 < sum(output.num_accepted for output in outputs) < num_drafts, speculation


@pytest.mark.parametrize("runs", [params_of(EVERY)], indirect=True)
def test_a_sampled_token_has_the_highest_score(runs: Runs) -> None:
    """Other tokens are judged by it."""
    cell = runs.column.cells()[0].baseline
    found = [int(runs.scores(cell, position).argmax()) for position in range(8)]
    assert found == runs.output(cell).ids[:8]


def cells_of(runs: Runs, promises: set[Promise]) -> Sequence[Cell]:
    return [cell for cell in covering_cells() if rule_of(runs.column, cell).promise in promises]
