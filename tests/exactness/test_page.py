"""docs/exactness.md follows from the columns and the rules."""

from itertools import product

from tests.exactness.cells import DIMENSIONS, Cell, covering_cells, every_cell
from tests.exactness.columns import COLUMNS
from tests.exactness.page import PAGE, page
from tests.exactness.rules import RULES, Promise, rule_of
from tests.selection import groups_of

MAX_LINES = 150


def test_the_page_matches_the_rules() -> None:
    assert PAGE.read_text() == page(), "the rules changed: run `make docs`"
    assert page().count("\n") <= MAX_LINES


def test_each_rule_is_the_promise_for_a_cell_and_has_a_reason() -> None:
    used = {id(rule_of(column, cell)) for column in COLUMNS for cell in column.cells()}
    assert used == set(map(id, RULES))
    assert all(rule.title and rule.reason for rule in RULES)
    for rule in RULES:
        assert bool(rule.words) == (rule.promise is Promise.REFUSED)
        assert bool(rule.tolerance) == (rule.promise is Promise.TO_ROUNDING)


def test_the_cells_of_a_column_have_every_pair_of_values() -> None:
    found = {pair for cell in covering_cells() for pair in groups_of(cell, 2)}
    assert found == {pair for cell in every_cell() for pair in groups_of(cell, 2)}
    largest = sorted(map(len, DIMENSIONS.values()))[-2:]
    assert len(covering_cells()) == largest[0] * largest[1], "no smaller number has every pair"


def test_every_cell_is_a_combination_of_all_dimensions() -> None:
    assert tuple(DIMENSIONS) == Cell._fields
    assert every_cell() == [Cell(*values) for values in product(*DIMENSIONS.values())]
