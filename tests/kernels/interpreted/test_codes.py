"""GEMMs with quantized weights, by Triton's kernels."""

from tests.kernels.test_codes import (
    test_a_float32_result_is_not_rounded,
    test_a_tokens_result_is_the_same_bits_whatever_is_beside_it,
    test_codes_without_kernels_are_torchs,
    test_decoded_rows_are_those_of_all_values_to_the_bit,
    test_decoded_weights_are_their_values_to_the_bit,
    test_gates_open_for_ups,
    test_it_is_the_product_with_what_the_codes_stand_for,
    test_many_tokens_are_multiplied_with_decoded_weights,
    test_nan_stays_with_its_token,
    test_norm_bias_and_residual_are_added,
    test_what_kernels_cannot_read_is_an_error,
)
