"""Rows and their parts of the four buffers."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.wire.messages import TokenRow, TokenRun
from shared.wire.token_arrays import Layout, Selection, TokenArrays, bytes_of, first_tokens, join

widths = st.sampled_from([(0, 0), (1, 0), (4, 3), (9, 0)])
shapes = st.lists(st.tuples(st.integers(0, 3), widths), max_size=8)


def message(shapes) -> tuple[list[TokenRow], list[TokenArrays]]:
    """Rows and their values, all of them distinct."""
    rows, parts, start = [], [], 0
    for num_tokens, (num_values, num_top_ids) in shapes:
        row = TokenRow("r", 1, 0, TokenRun(num_tokens, num_values, num_top_ids))
        sizes = (num_tokens, num_tokens * num_values, num_tokens * num_top_ids)
        numbers = [np.arange(start, start := start + size) for size in sizes]
        ranks = np.arange(start, start := start + (num_tokens if num_values else 0))
        ids, values, top_ids = numbers
        rows.append(row)
        parts.append(
            TokenArrays(
                ids.astype("i4"), values.astype("f4"), top_ids.astype("i4"), ranks.astype("i4")
            )
        )
    return rows, parts


def same(first: TokenArrays, second: TokenArrays) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))


@given(shapes)
def test_each_row_gets_its_part_and_their_bytes_are_counted(shapes):
    rows, parts = message(shapes)
    layout = Layout(rows, join(parts) if parts else TokenArrays())
    for index, (row, part) in enumerate(zip(rows, parts, strict=True)):
        assert same(layout.part(index, index + 1), part)
        assert bytes_of(row.run) == part.num_bytes


@given(shapes, st.data())
def test_a_selection_holds_the_chosen_rows_whole_or_cut(shapes, data):
    rows, parts = message(shapes)
    selection = Selection(Layout(rows, join(parts) if parts else TokenArrays()))
    expected = [TokenArrays()]
    for index, (row, part) in enumerate(zip(rows, parts, strict=True)):
        if data.draw(st.booleans()):
            num = data.draw(st.integers(0, row.run.num_tokens))
            selection.add(index, num)
            expected.append(first_tokens(row.run, part, num))
    assert same(selection.arrays(), join(expected))


def test_rows_that_lie_together_are_not_copied():
    rows, parts = message([(2, (9, 0))] * 4)
    arrays = join(parts)
    selection = Selection(Layout(rows, arrays))
    for index in (1, 2):
        selection.add(index)
    assert np.shares_memory(selection.arrays().values, arrays.values)


def test_rows_with_more_tokens_than_arrays_are_no_layout():
    with pytest.raises(Exception, match="count other tokens"):
        Layout([TokenRow("r", 1, 0, TokenRun(2))], TokenArrays(np.zeros(1, np.int32)))
    with pytest.raises(Exception, match="count other tokens"):
        Layout([TokenRow("r", 1, 0, TokenRun(1, 1))], TokenArrays(np.zeros(1, np.int32)))
