"""The kernel of rope_kv compiles for GPUs without spills."""

import pytest

from kernels.rope_kv.triton import BLOCK_HEADS, NUM_WARPS, rope_kv_kernel
from tests.kernels.compiled import ARCHS, compile_kernel
from tests.selection import every_pair

# Heads, KV heads, their size, turned elements, has a norm, turns neighbours.
HEADS = (
    (32, 8, 128, 128, True, False),
    (4, 2, 64, 64, False, False),
    (16, 4, 256, 256, False, True),
    (96, 8, 128, 64, True, False),
)
FLOATS = ("p_heads", "p_query_norm", "p_key_norm", "p_query", "p_kv_cache")


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(
    ("heads", "codes", "dtype"), every_pair(HEADS, [None, "i8", "u8"], ["bf16", "fp32"])
)
def test_kernel(
    heads: tuple[int, int, int, int, bool, bool], codes: str | None, dtype: str, arch: int
) -> None:
    num_heads, num_kv_heads, head_dim, rotary_dim, has_norm, is_interleaved = heads
    signature = dict.fromkeys(FLOATS, f"*{dtype}") | {
        "p_rotation": "*fp32",
        "p_kv_scales": "*fp32",
        "p_slot_mapping": "*i64",
        "num_tokens": "i32",
        "eps": "fp32",
    }
    constants: dict[str, int | None] = {
        "NUM_HEADS": num_heads,
        "NUM_KV_HEADS": num_kv_heads,
        "HEAD_DIM": head_dim,
        "BLOCK_SIZE": 16,
        "BLOCK_STRIDE": 16 * 2 * num_kv_heads * head_dim,
        "SCALES_STRIDE": 16 * 2 * num_kv_heads,
        "ROTARY_DIM": rotary_dim,
        "IS_INTERLEAVED": is_interleaved,
        "BLOCK_HEADS": BLOCK_HEADS,
        "BLOCK_DIM": head_dim,
        "IS_DEPENDENT": False,
    }
    if not has_norm:
        constants |= dict.fromkeys(FLOATS[1:3])
    if codes is None:
        constants["p_kv_scales"] = None
    else:
        signature["p_kv_cache"] = f"*{codes}"
    if constants.keys() & signature.keys():
        signature = {name: kind for name, kind in signature.items() if name not in constants}
    resources = compile_kernel(rope_kv_kernel, signature, constants, arch, num_warps=NUM_WARPS)
    assert resources.num_stack_bytes == 0
