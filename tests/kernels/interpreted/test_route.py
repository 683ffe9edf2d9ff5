"""Routing by Triton's kernel."""

from tests.kernels.test_route import (
    test_a_bias_changes_the_choice_alone,
    test_a_small_sum_does_not_make_large_weights,
    test_a_tokens_experts_are_the_same_whatever_is_beside_it,
    test_each_token_goes_to_its_best_experts,
    test_logits_of_experts_are_exact_and_stand_alone,
    test_nan_stays_with_its_token_and_chooses_experts_that_exist,
    test_of_equal_experts_the_first_is_chosen,
)
