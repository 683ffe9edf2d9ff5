"""Logits rules by slot, by Triton's kernel."""

from tests.kernels.test_change_logits import (
    test_logits_are_changed_as_the_reference_and_the_host_change_them,
    test_no_rows_are_changed_to_none,
)
