"""Rows in pieces, by the Triton kernel."""

from tests.kernels.test_pieces import (
    test_parts_of_rows_are_packed_and_put_back,
    test_rows_of_sections_are_packed_and_put_back,
)

__all__ = [
    "test_parts_of_rows_are_packed_and_put_back",
    "test_rows_of_sections_are_packed_and_put_back",
]
