"""rope_kv by Triton's kernel."""

from tests.kernels.test_rope_kv import (
    test_any_number_and_size_of_heads_agrees,
    test_any_number_of_tokens_agrees,
    test_codes_agree,
    test_codes_of_nan_have_a_scale_that_is,
    test_kinds_of_heads_agree,
    test_several_tokens_may_go_to_one_entry_of_the_null_block,
)
