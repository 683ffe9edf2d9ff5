"""The kernels of latent attention compile for GPUs: nothing spills, shared memory suffices."""

from typing import Any

import pytest
import torch
import triton

from benchmarks.gpu.dry_card import MAX_SHARED_BYTES
from kernels.latent.triton import (
    BLOCK_HEADS,
    BLOCK_IN,
    BLOCK_OUT,
    BLOCK_TOKENS,
    NUM_WARPS,
    product_kernel,
    product_warps,
    rotate_kernel,
    write_kernel,
)
from kernels.paged_attention import TILE
from kernels.paged_attention.triton.latent import (
    BLOCK_SUMS,
    chunk_config,
    latent_chunk_kernel,
    latent_config,
    latent_decode_kernel,
    latent_sum_kernel,
    num_splits,
)
from kernels.paged_attention.triton.tiles import MAX_REGISTERS
from tests.kernels.compiled import ARCHS, compile_kernel
from tests.kernels.latents import Shape

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
DEEPSEEK_V3, DEEPSEEK_V2_LITE = Shape(128, 512, 128, 64, 128), Shape(16, 512, 128, 64, 128)
each_dtype = pytest.mark.parametrize(
    "dtype", ["bf16", pytest.param("fp32", marks=pytest.mark.slow)]
)
each_arch = pytest.mark.parametrize("arch", ARCHS)


# A prefill kernel spills (80 bytes on sm_90 with Triton 3.6, 672 with 3.9), and with 3.6 takes a
# fifth of the time of one with 16 queries, which does not.
CHUNK_SPILL_BYTES = 700


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


def check(
    kernel: Any,
    constants: dict[str, Any],
    dtype: str,
    arch: int,
    num_warps: int,
    codes: str | None = None,
    **options: int,
) -> None:
    """float32 and integer arguments have their type here; the others have ``dtype``, but for a
    cache of ``codes``."""
    types = {
        "p_rotation": "*fp32",
        "p_partials": "*fp32",
        "p_weights": "*fp32",
        "p_slot_mapping": "*i64",
        "num_tokens": "i32",
        "table_stride": "i32:16",
        "max_keys": "i32:16",
        "scale": "fp32",
        "eps": "fp32",
    }
    ints = ("slots", "tables", "starts", "first_keys", "token_starts", "tile_rows", "tile_starts")
    types |= dict.fromkeys((f"p_{name}" for name in ints), "*i32")
    types |= {"p_kv_scales": "*fp32", "p_kv_cache": f"*{codes or dtype}"}
    constants = constants | {"UNIT": DTYPES[dtype].itemsize if codes else 1}
    constants |= {} if codes else {"p_kv_scales": None}
    names = kernel.arg_names
    known = {name: value for name, value in constants.items() if name in names}
    signature = {
        name: types.get(name, f"*{dtype}")
        for name in names
        if name not in known and name[0].islower()
    }
    resources = compile_kernel(kernel, signature, known, arch, num_warps=num_warps, **options)
    spills = dtype == "bf16" and kernel is latent_chunk_kernel
    assert resources.num_stack_bytes <= (CHUNK_SPILL_BYTES if spills else 0)
    assert resources.shared_bytes <= MAX_SHARED_BYTES[arch]


def sizes(shape: Shape) -> dict[str, Any]:
    return {
        "NUM_HEADS": shape.num_heads,
        "NOPE_DIM": shape.nope_dim,
        "RANK": shape.rank,
        "ROPE_DIM": shape.rope_dim,
        "IS_INTERLEAVED": True,
        "BLOCK_SIZE": 16,
        "BLOCK_HEADS": BLOCK_HEADS,
        "BLOCK_RANK": triton.next_power_of_2(shape.rank),
        "BLOCK_ROPE": triton.next_power_of_2(shape.rope_dim),
        "NUM_SPLITS": num_splits(shape.num_heads),
        "SPLIT_TILES": 4,
    }


@each_arch
@each_dtype
@pytest.mark.parametrize("codes", [None, "u8", "i8"])
def test_the_kernels_before_attention_compile(codes: str | None, dtype: str, arch: int) -> None:
    check(write_kernel, sizes(DEEPSEEK_V3), dtype, arch, NUM_WARPS, codes)
    check(rotate_kernel, sizes(DEEPSEEK_V3), dtype, arch, NUM_WARPS)


@each_arch
@each_dtype
@pytest.mark.parametrize("is_behind", [False, True])
def test_products_of_each_head(is_behind: bool, dtype: str, arch: int) -> None:
    num_heads, rank, nope_dim, rope_dim, value_dim = DEEPSEEK_V3
    half = (nope_dim + value_dim) * rank
    behind = (rank, value_dim, (num_heads * rank, rank), (half, rank, 1), value_dim)
    before = (nope_dim, rank, (num_heads * 192, 192), (half, 1, rank), rank + rope_dim)
    inputs, outputs, of_rows, of_weight, width = behind if is_behind else before
    constants = {
        "INPUTS": inputs,
        "OUTPUTS": outputs,
        "X_STRIDES": of_rows,
        "WEIGHT_STRIDES": of_weight,
        "OUT_STRIDES": (num_heads * width, width),
        "BLOCK_TOKENS": BLOCK_TOKENS,
        "BLOCK_OUT": BLOCK_OUT,
        "BLOCK_IN": BLOCK_IN,
    }
    check(product_kernel, constants, dtype, arch, product_warps(DTYPES[dtype]))


@each_dtype
@pytest.mark.parametrize(
    ("shape", "width", "hides", "codes"),
    [
        (DEEPSEEK_V3, 1, False, None),
        (DEEPSEEK_V3, 3, True, None),
        (DEEPSEEK_V3, 1, False, "u8"),
        slow(DEEPSEEK_V2_LITE, 1, False, None),
        slow(DEEPSEEK_V3, 3, True, "i8"),
    ],
)
@each_arch
def test_rows_that_decode(
    shape: Shape, width: int, hides: bool, codes: str | None, dtype: str, arch: int
) -> None:
    config = latent_config(DTYPES[dtype])
    constants = sizes(shape) | {
        "WIDTH": width,
        "NUM_TILES": triton.cdiv(width * shape.num_heads, config.num_queries),
        "BLOCK_QUERIES": config.num_queries,
        "BLOCK_KEYS": config.num_keys,
        **({} if hides else {"p_first_keys": None}),
    }
    options = {"num_stages": config.num_stages, "max_registers": MAX_REGISTERS}
    check(latent_decode_kernel, constants, dtype, arch, config.num_warps, codes, **options)
    check(latent_sum_kernel, constants | {"BLOCK": BLOCK_SUMS}, dtype, arch, 4)


@each_dtype
@pytest.mark.parametrize(
    ("hides", "codes"), [(True, None), slow(False, None), slow(False, "u8"), slow(True, "i8")]
)
@each_arch
def test_chunks(hides: bool, codes: str | None, dtype: str, arch: int) -> None:
    config = chunk_config(DTYPES[dtype], has_codes=codes is not None)
    constants = sizes(DEEPSEEK_V3) | {
        "NUM_PARTS": triton.cdiv(TILE * DEEPSEEK_V3.num_heads, config.num_queries),
        "BLOCK_QUERIES": config.num_queries,
        "BLOCK_KEYS": config.num_keys,
        **({} if hides else {"p_first_keys": None}),
    }
    options = {"num_stages": config.num_stages, "max_registers": MAX_REGISTERS}
    check(latent_chunk_kernel, constants, dtype, arch, config.num_warps, codes, **options)
