"""Experts by Triton's kernels."""

from tests.kernels.test_experts import (
    test_a_long_prompt_has_the_bits_of_a_short_one,
    test_a_tokens_result_is_the_same_bits_whatever_is_beside_it,
    test_each_token_has_the_sum_of_its_experts,
    test_experts_may_have_another_act,
    test_experts_may_have_biases_and_a_clamp,
    test_experts_may_have_no_gates,
    test_loads_may_be_uneven,
    test_nan_stays_with_its_token,
    test_one_of_the_weights_may_be_in_codes,
    test_pairs_are_in_blocks_of_one_expert,
    test_some_of_the_experts_give_their_part_of_the_sum,
    test_unreadable_tensors_are_errors,
    test_weights_may_be_in_codes,
)
