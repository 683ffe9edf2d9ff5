"""The kernels of short_conv compile for GPUs without spills."""

import pytest

from kernels.short_conv.triton import BLOCK, conv_kernel, write_kernel
from tests.kernels.compiled import ARCHS, compile_kernel

SHAPE: dict[str, int | None] = {
    "FIRST": 1024,
    "CHANNELS": 1024,
    "SIZE": 2048,
    "PART": 1024,
    "BLOCK_SIZE": 16,
    "BLOCK_STRIDE": 16 * 1024,
    "BLOCK": BLOCK,
}
INTS = {"p_slot_mapping": "*i64"}


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_write_kernel(dtype: str, arch: int) -> None:
    signature = dict.fromkeys(("p_x", "p_cache"), f"*{dtype}") | INTS
    assert compile_kernel(write_kernel, signature, SHAPE, arch, num_warps=4).num_stack_bytes == 0


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("has_bias", [False, True])
def test_conv_kernel(has_bias: bool, dtype: str, arch: int) -> None:
    floats = ["p_x", "p_weight", "p_cache", "p_out"] + ["p_bias"] * has_bias
    signature = dict.fromkeys(floats, f"*{dtype}") | INTS | {"p_places": "*i64"}
    constants = SHAPE | {"WIDTH": 3} | ({} if has_bias else {"p_bias": None})
    assert compile_kernel(conv_kernel, signature, constants, arch, num_warps=4).num_stack_bytes == 0
