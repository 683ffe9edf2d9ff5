"""Products with few rows, norms and gates, compiled for cards that are not there."""

from typing import Any

import pytest
import torch
import triton

from kernels.linear.triton import config, gated_kernel, linear_kernel
from kernels.rms_norm.triton import num_warps, rms_norm_kernel
from kernels.silu_mul.triton import BLOCK, silu_mul_kernel
from tests.kernels.compiled import ARCHS, MAX_SHARED_BYTES, Resources, compile_kernel

TYPES = {torch.bfloat16: "*bf16", torch.float32: "*fp32"}
# [rows, columns] of the weights of Qwen3-8B and of the embedded model.
QKV, OUT, DOWN, HEAD = (6144, 4096), (4096, 4096), (4096, 12288), (151936, 4096)
TINY_QKV, TINY_DOWN = (512, 256), (256, 768)
GATED = [(24576, 4096), (1536, 256)]
# float32 has no tensor cores and takes the most registers.
WIDEST = [(HEAD, 64, torch.float32), (TINY_QKV, 64, torch.float32)]
PRODUCTS = [
    (shape, num_tokens, torch.bfloat16)
    for shape in (QKV, OUT, DOWN, HEAD, TINY_QKV, TINY_DOWN)
    for num_tokens in (1, 32, 64)
]
archs = pytest.mark.parametrize("arch", ARCHS)
dtypes = pytest.mark.parametrize("dtype", TYPES, ids=str)


def assert_fits(resources: Resources, arch: int) -> None:
    assert resources.num_stack_bytes == 0
    assert resources.shared_bytes <= MAX_SHARED_BYTES[arch]


def compile_product(
    kernel: Any,
    pointers: dict[str, str],
    absent: list[str],
    shape: tuple[int, int],
    dtype: torch.dtype,
    num_tokens: int,
    arch: int,
) -> Resources:
    num_rows, size = shape
    chosen = config(num_rows, size, dtype.itemsize, num_tokens)
    rows = {"I": num_rows // 2} if kernel is gated_kernel else {"N": num_rows}
    blocks = dict(zip(("BLOCK_ROWS", "BLOCK_K", "BLOCK_T"), chosen[:3], strict=True))
    constants = dict.fromkeys(absent) | rows | {"K": size, "STRIDE": size} | blocks
    signature = pointers | {"eps": "fp32", "num_tokens": "i32"}
    stages = {"num_warps": chosen.num_warps, "num_stages": chosen.num_stages}
    return compile_kernel(kernel, signature, constants, arch, **stages)


@archs
@pytest.mark.parametrize(("shape", "num_tokens", "dtype"), [*PRODUCTS, *WIDEST], ids=str)
def test_a_product_fits(
    shape: tuple[int, int], num_tokens: int, dtype: torch.dtype, arch: int
) -> None:
    """After a norm where the model has it, else with a residual."""
    has_norm = shape in (QKV, HEAD, TINY_QKV)
    there, absent = ("p_norm", "p_residual") if has_norm else ("p_residual", "p_norm")
    pointers = dict.fromkeys(["p_x", "p_weight", there, "p_out"], TYPES[dtype])
    if shape == HEAD:
        pointers["p_out"] = "*fp32"
    resources = compile_product(
        linear_kernel, pointers, ["p_bias", absent], shape, dtype, num_tokens, arch
    )
    assert_fits(resources, arch)


@archs
@pytest.mark.parametrize(
    ("num_tokens", "dtype"), [(1, torch.bfloat16), (64, torch.bfloat16), (64, torch.float32)]
)
@pytest.mark.parametrize("shape", GATED, ids=str)
def test_gates_and_ups_fit(
    shape: tuple[int, int], num_tokens: int, dtype: torch.dtype, arch: int
) -> None:
    pointers = dict.fromkeys(["p_x", "p_weight", "p_norm", "p_out"], TYPES[dtype])
    resources = compile_product(gated_kernel, pointers, ["p_bias"], shape, dtype, num_tokens, arch)
    assert_fits(resources, arch)


@archs
@dtypes
@pytest.mark.parametrize("size", [64, 256, 4096, 12288])
def test_a_norm_fits(size: int, dtype: torch.dtype, arch: int) -> None:
    pointers = dict.fromkeys(["p_x", "p_weight", "p_out"], TYPES[dtype])
    constants = {"SIZE": size, "BLOCK": triton.next_power_of_2(size)}
    warps = num_warps(size, dtype.itemsize)
    signature = pointers | {"eps": "fp32"}
    assert_fits(compile_kernel(rms_norm_kernel, signature, constants, arch, num_warps=warps), arch)


@archs
@dtypes
def test_gates_of_many_rows_fit(dtype: torch.dtype, arch: int) -> None:
    pointers = dict.fromkeys(["p_gate_up", "p_out"], TYPES[dtype])
    constants = {"SIZE": 12288, "BLOCK": BLOCK}
    assert_fits(compile_kernel(silu_mul_kernel, pointers, constants, arch, num_warps=4), arch)
