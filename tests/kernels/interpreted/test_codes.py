"""GEMMs with quantized weights, by Triton's kernels."""

from tests.kernels.test_codes import (
    test_a_float32_result_is_not_rounded,
    test_a_tokens_result_is_the_same_bits_whatever_is_beside_it,
    test_codes_without_kernels_are_torchs,
    test_decoded_rows_match_all_values_to_the_bit,
    test_decoded_weights_are_their_values_to_the_bit,
    test_gates_open_for_ups,
    test_it_is_the_product_with_the_dequantized_weight,
    test_many_tokens_are_multiplied_with_decoded_weights,
    test_nan_stays_with_its_token,
    test_norm_bias_and_residual_are_added,
    test_unreadable_tensors_are_errors,
)
