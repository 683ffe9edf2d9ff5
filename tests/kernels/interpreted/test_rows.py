"""Row-wise operators by Triton's kernels."""

from tests.kernels.test_rms_norm import (
    test_a_weight_in_float32_norms_rows_of_bfloat16,
    test_heads_among_others_are_normed,
    test_rows_are_normed,
)
from tests.kernels.test_silu_mul import (
    test_gates_far_from_zero_are_shut_or_open,
    test_gates_open_for_ups,
)
