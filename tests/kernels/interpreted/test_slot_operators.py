"""Slot operators of a step, by Triton's kernels."""

from tests.kernels.test_slot_operators import (
    test_a_pair_more_is_that_of_the_last_draft,
    test_drafts_are_declared_accepted_by_random_bits_of_their_positions,
    test_drafts_are_declared_accepted_by_the_random_bits_of_torch,
    test_drafts_are_stored_where_there_is_room,
    test_rows_that_decode_put_their_last_id_and_their_drafts_in,
    test_the_pairs_of_a_step_follow_its_tokens,
    test_tokens_are_accepted_as_row_by_row,
)

__all__ = [
    "test_a_pair_more_is_that_of_the_last_draft",
    "test_drafts_are_declared_accepted_by_random_bits_of_their_positions",
    "test_drafts_are_declared_accepted_by_the_random_bits_of_torch",
    "test_drafts_are_stored_where_there_is_room",
    "test_rows_that_decode_put_their_last_id_and_their_drafts_in",
    "test_the_pairs_of_a_step_follow_its_tokens",
    "test_tokens_are_accepted_as_row_by_row",
]
