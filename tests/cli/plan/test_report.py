"""The printed plan."""

import pytest

from cli.plan.report import number_of


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0016, "0.0016"), (0.05, "0.05"), (1.26, "1.3"), (12.34, "12.3"), (339_546.6, "339,547")],
)
def test_a_number_has_two_digits_or_more(value: float, text: str) -> None:
    assert number_of(value) == text
