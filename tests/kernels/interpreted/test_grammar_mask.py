"""Masks of grammars, by Triton's kernel."""

from tests.kernels.test_grammar_mask import (
    test_no_row_is_no_change,
    test_tokens_without_a_bit_are_hidden,
)
