"""The kernels of adapters compile for GPUs without spills."""

import pytest

from kernels.adapt.bank import BLOCK_OUTPUTS, SPLIT_INPUTS
from kernels.adapt.triton import CHUNK_TOKENS, block_k, deltas_kernel, inner_kernel, num_warps_of
from kernels.paged_attention import TILE
from tests.kernels.compiled import ARCHS, compile_kernel

DECODE = {"WIDTH": 4, "PER_TILE": 1, "BLOCK_T": 16}
CHUNKS = {"WIDTH": TILE, "PER_TILE": TILE // CHUNK_TOKENS, "BLOCK_T": CHUNK_TOKENS}
TABLES = ("p_token_starts", "p_tile_rows", "p_tile_starts")
STRIDES = {"num_tokens": "i32", "stride": "i32:16", "rank_stride": "i32:16"}
cases = pytest.mark.parametrize(
    ("rows", "dtype", "rank"),
    [(DECODE, "bf16", 16), (CHUNKS, "bf16", 64), (CHUNKS, "fp32", 64), (CHUNKS, "bf16", 512)],
    ids=["decode", "chunks", "float32", "rank 512"],
)
archs = pytest.mark.parametrize("arch", ARCHS)


def ints_and_none(rows: dict[str, int]) -> tuple[dict[str, str], dict[str, None]]:
    """Pointers to integers, and the missing ones of decode rows."""
    ints = dict.fromkeys(("p_of_slots", "p_slots"), "*i32")
    if rows is DECODE:
        return ints, dict.fromkeys(TABLES)
    return ints | dict.fromkeys(TABLES, "*i32"), {}


@archs
@cases
def test_inner_products(rows: dict[str, int], dtype: str, rank: int, arch: int) -> None:
    ints, absent = ints_and_none(rows)
    signature = dict.fromkeys(("p_x", "p_a"), f"*{dtype}") | {"p_out": "*fp32"} | ints | STRIDES
    sizes = {
        "K": 4096,
        "RANK": rank,
        "SPLIT": SPLIT_INPUTS,
        "BLOCK_K": block_k(4 if dtype == "fp32" else 2, rank),
    }
    constants = absent | sizes | rows
    found = compile_kernel(inner_kernel, signature, constants, arch, num_warps=num_warps_of(rank))
    assert found.num_stack_bytes == 0


@archs
@cases
def test_deltas(rows: dict[str, int], dtype: str, rank: int, arch: int) -> None:
    ints, absent = ints_and_none(rows)
    signature = dict.fromkeys(("p_y", "p_b"), f"*{dtype}") | {"p_inner": "*fp32"} | ints | STRIDES
    signature |= {"p_blocks": "*i32", "scale": "fp32"}
    sizes = {"N": 6144, "NUM_SPLITS": 8, "NUM_PARTS": 3, "RANK": rank, "BLOCK_N": BLOCK_OUTPUTS}
    constants = absent | sizes | rows
    found = compile_kernel(deltas_kernel, signature, constants, arch, num_warps=num_warps_of(rank))
    assert found.num_stack_bytes == 0
