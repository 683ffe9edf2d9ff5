"""Kernels for logits rules by slot compile for supported GPUs without spills."""

import pytest

from benchmarks.gpu.dry_card import MAX_SHARED_BYTES
from kernels.change_logits import triton as kernels
from tests.kernels.compiled import ARCHS, compile_kernel

POINTERS = {
    **dict.fromkeys(("p_logits", "p_biases", "p_repetition", "p_changed"), "*fp32"),
    **dict.fromkeys(("p_slots", "p_ids", "p_num_tokens", "p_is_changed"), "*i32"),
    **dict.fromkeys(("p_seen", "p_min_ends"), "*i32"),
    **dict.fromkeys(("p_presence", "p_frequency"), "*fp64"),
    "p_positions": "*i64",
}


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("max_ids", [1, 4, 17])
def test_changes_compile_without_spills(max_ids: int, arch: int) -> None:
    constants = {"MAX_IDS": max_ids, "CHUNK": kernels.CHUNK}
    signature = {**POINTERS, "vocab_size": "i32:16"}
    taken = compile_kernel(
        kernels.change_kernel, signature, constants, arch, num_warps=kernels.NUM_WARPS
    )
    assert taken.num_stack_bytes == 0
    assert taken.shared_bytes <= MAX_SHARED_BYTES[arch]
