"""Masks of grammars, by Triton's kernel."""

from tests.kernels.test_grammar_mask import test_no_row_is_no_change, test_what_has_no_bit_is_hidden
