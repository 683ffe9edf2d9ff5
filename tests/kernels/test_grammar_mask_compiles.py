"""The kernel of masks compiles for the cards we serve, and spills nothing."""

import pytest

from kernels.grammar_mask.triton import BLOCK, NUM_WARPS, hide_kernel
from tests.kernels.compiled import ARCHS, compile_kernel


@pytest.mark.parametrize("arch", ARCHS)
def test_masks_compile_without_spills(arch: int) -> None:
    kinds = {"p_logits": "*fp32", "p_rows": "*i64", "p_masks": "*i32"}
    kinds |= dict.fromkeys(("logits_stride", "mask_stride", "vocab_size"), "i32")
    found = compile_kernel(hide_kernel, kinds, {"BLOCK": BLOCK}, arch, num_warps=NUM_WARPS)
    assert found.num_stack_bytes == 0
    assert found.shared_bytes <= 1 << 10
