"""The kernel of prefetches compiles for the cards we serve, spills nothing and reads."""

import pytest

from benchmarks.gpu.dry_card import resources
from kernels.prefetch.triton import BLOCK, NUM_WARPS, prefetch_kernel
from tests.kernels.compiled import ARCHS, compiled


@pytest.mark.parametrize("arch", ARCHS)
def test_prefetches_compile_without_spills(arch: int) -> None:
    kinds = {"p_words": "*i32", "p_sums": "*i32", "num_words": "i32"}
    found = compiled(prefetch_kernel, kinds, {"BLOCK": BLOCK}, arch, NUM_WARPS, 3)
    assert "ld.global.cg" in found.asm["ptx"]
    taken = resources(found.asm["cubin"], found.metadata.shared)
    assert taken.num_stack_bytes == 0
