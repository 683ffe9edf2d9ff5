"""``rope_kv`` as one kernel."""

import torch
import triton
import triton.language as tl
from torch import Tensor

# Four heads of 128 in bfloat16 are 16 bytes for each of 64 threads; unmeasured.
BLOCK_HEADS = 4
NUM_WARPS = 2


def rope_kv(
    heads: Tensor,
    query_norm: Tensor | None,
    key_norm: Tensor | None,
    eps: float,
    table: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    kv_cache: Tensor,
    is_interleaved: bool,
) -> Tensor:
    num_kv_heads, head_dim = kv_cache.shape[3:]
    num_tokens = len(heads)
    num_heads = heads.shape[1] // head_dim - 2 * num_kv_heads
    query = torch.empty(num_tokens, num_heads, head_dim, dtype=heads.dtype, device=heads.device)
    if not num_tokens:
        return query
    if not (heads.is_contiguous() and kv_cache.is_contiguous() and table.is_contiguous()):
        raise ValueError("rope_kv takes contiguous heads, kv_cache and table")
    grid = (num_tokens, triton.cdiv(num_heads + 2 * num_kv_heads, BLOCK_HEADS))
    rope_kv_kernel[grid](
        heads,
        query_norm,
        key_norm,
        table,
        positions,
        slot_mapping,
        query,
        kv_cache,
        table.shape[1],
        eps,
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        IS_INTERLEAVED=is_interleaved,
        BLOCK_HEADS=BLOCK_HEADS,
        BLOCK_DIM=triton.next_power_of_2(head_dim),
        num_warps=NUM_WARPS,
    )
    return query


@triton.jit
def rope_kv_kernel(
    p_heads,  # [T, H + 2 H_kv, D]
    p_query_norm,  # [D] | None
    p_key_norm,  # [D] | None
    p_table,  # [2, P, D] float32
    p_positions,  # [T] int64
    p_slot_mapping,  # [T] int64
    p_query,  # [T, H, D]
    p_kv_cache,  # [places, 2 * H_kv, D]
    num_positions,
    eps,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    IS_INTERLEAVED: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    """A program: one token, BLOCK_HEADS heads; values pass through."""
    i_token = tl.program_id(0).to(tl.int64)
    o_head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    o_dim = tl.arange(0, BLOCK_DIM)
    # A pair's other element is loaded (and normed) once more: cheaper than moving it between lanes.
    o_partner = o_dim ^ 1 if IS_INTERLEAVED else (o_dim + HEAD_DIM // 2) % HEAD_DIM
    is_dim = (o_dim < HEAD_DIM)[None, :]
    is_query = (o_head < NUM_HEADS)[:, None]
    is_kv = (o_head >= NUM_HEADS) & (o_head < NUM_HEADS + 2 * NUM_KV_HEADS)
    is_there = (is_query | is_kv[:, None]) & is_dim
    is_rotary = (o_head < NUM_HEADS + NUM_KV_HEADS)[:, None]

    position = tl.load(p_positions + i_token)
    kv_slot = tl.load(p_slot_mapping + i_token)
    p_token = p_heads + i_token * (NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM
    p_head = p_token + o_head[:, None] * HEAD_DIM
    b_head = tl.load(p_head + o_dim[None, :], mask=is_there, other=0)
    b_partner = tl.load(p_head + o_partner[None, :], mask=is_there, other=0)

    b_own, b_other = b_head.to(tl.float32), b_partner.to(tl.float32)
    if p_query_norm is not None:
        scale = tl.rsqrt(tl.sum(b_own * b_own, 1) / HEAD_DIM + eps)[:, None]
        own_weight = _norm_weight(p_query_norm, p_key_norm, o_dim, is_query, is_dim)
        other_weight = _norm_weight(p_query_norm, p_key_norm, o_partner, is_query, is_dim)
        b_own = (b_own * scale * own_weight).to(b_head.dtype).to(tl.float32)
        b_other = (b_other * scale * other_weight).to(b_head.dtype).to(tl.float32)

    p_cos = p_table + position * HEAD_DIM + o_dim[None, :]
    cos = tl.load(p_cos, mask=is_dim, other=0)
    sin = tl.load(p_cos + num_positions * HEAD_DIM, mask=is_dim, other=0)
    b_rotated = (b_own * cos + b_other * sin).to(b_head.dtype)
    b_out = tl.where(is_rotary, b_rotated, b_head)

    p_own = p_query + (i_token * NUM_HEADS + o_head[:, None]) * HEAD_DIM + o_dim[None, :]
    tl.store(p_own, b_out, mask=is_query & is_dim)
    # A place has its keys before its values, as a token has.
    o_kv = o_head[:, None] - NUM_HEADS
    p_kv_slot = p_kv_cache + (kv_slot * 2 * NUM_KV_HEADS + o_kv) * HEAD_DIM + o_dim[None, :]
    tl.store(p_kv_slot, b_out, mask=is_kv[:, None] & is_dim)


@triton.jit
def _norm_weight(p_query_norm, p_key_norm, o_dim, is_query, is_dim):
    """[BLOCK_HEADS, BLOCK_DIM] float32: each head's own."""
    query_weight = tl.load(p_query_norm + o_dim[None, :], mask=is_dim, other=0).to(tl.float32)
    key_weight = tl.load(p_key_norm + o_dim[None, :], mask=is_dim, other=0).to(tl.float32)
    return tl.where(is_query, query_weight, key_weight)
