"""``rope_kv`` as one kernel."""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.kv_codes.triton import quantize
from kernels.programmatic_launch.triton import begin, early
from kernels.rms_norm import Norm
from kernels.sizes import cdiv, has_contiguous_blocks, next_power_of_2

# Four heads of 128 in bfloat16 are 16 bytes for each of 64 threads; unmeasured.
BLOCK_HEADS = 4
NUM_WARPS = 2


def rope_kv(
    heads: Tensor,
    query_norm: Norm | None,
    key_norm: Norm | None,
    rotation: Tensor,
    slot_mapping: Tensor,
    kv_cache: Tensor,
    is_interleaved: bool,
    kv_scales: Tensor | None = None,
) -> Tensor:
    entry, scales_stride = kv_cache.shape, 0 if kv_scales is None else kv_scales.stride(0)
    num_tokens, size = heads.shape
    num_heads = size // entry[4] - 2 * entry[3]
    query = torch.empty(num_tokens, num_heads, entry[4], dtype=heads.dtype, device=heads.device)
    if not num_tokens:
        return query
    if not (heads.is_contiguous() and has_contiguous_blocks(kv_cache) and rotation.is_contiguous()):
        raise ValueError("rope_kv takes contiguous heads, rotation and blocks of kv_cache")
    if kv_scales is not None and not has_contiguous_blocks(kv_scales):
        raise ValueError("rope_kv takes contiguous blocks of kv_scales")
    strides = kv_cache.stride(0), scales_stride
    num_parts, known = _constants(num_heads, entry, strides, rotation.shape[2], is_interleaved)
    rope_kv_kernel[num_tokens, num_parts](
        heads,
        None if query_norm is None else query_norm.weight,
        None if key_norm is None else key_norm.weight,
        rotation,
        slot_mapping,
        query,
        kv_cache,
        kv_scales,
        num_tokens,
        0.0 if query_norm is None else query_norm.eps,
        **known,
        **early(),
    )
    return query


@cache
def _constants(
    num_heads: int,
    entry: torch.Size,
    strides: tuple[int, int],
    rotary_dim: int,
    is_interleaved: bool,
) -> tuple[int, dict[str, int]]:
    """The programs for a token, and all constants of the kernel. ``entry``: the cache's shape."""
    _, block_size, _, num_kv_heads, head_dim = entry
    known = {
        "NUM_HEADS": num_heads,
        "NUM_KV_HEADS": num_kv_heads,
        "HEAD_DIM": head_dim,
        "BLOCK_SIZE": block_size,
        "BLOCK_STRIDE": strides[0],
        "SCALES_STRIDE": strides[1],
        "ROTARY_DIM": rotary_dim,
        "IS_INTERLEAVED": is_interleaved,
        "BLOCK_HEADS": BLOCK_HEADS,
        "BLOCK_DIM": next_power_of_2(head_dim),
        "num_warps": NUM_WARPS,
    }
    return cdiv(num_heads + 2 * num_kv_heads, BLOCK_HEADS), known


@triton.jit(do_not_specialize=["num_tokens"])
def rope_kv_kernel(
    p_heads,  # [T, H + 2 H_kv, D]
    p_query_norm,  # [D] | None
    p_key_norm,  # [D] | None
    p_rotation,  # [2, T, ROTARY_DIM] float32
    p_slot_mapping,  # [T] int64
    p_query,  # [T, H, D]
    p_kv_cache,  # [num_blocks + 1, BLOCK_SIZE, 2 * H_kv, D], strided
    p_kv_scales,  # [num_blocks + 1, BLOCK_SIZE, 2 * H_kv] float32, strided | None
    num_tokens,
    eps,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    SCALES_STRIDE: tl.constexpr,
    ROTARY_DIM: tl.constexpr,  # of a head's first elements
    IS_INTERLEAVED: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """One program per BLOCK_HEADS heads of a token; values pass through."""
    begin(IS_DEPENDENT)
    i_token = tl.program_id(0).to(tl.int64)
    o_head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    o_dim = tl.arange(0, BLOCK_DIM)
    # The other element of a pair is loaded (and normed) again: cheaper than moving it between
    # lanes.
    o_partner = o_dim ^ 1 if IS_INTERLEAVED else (o_dim + ROTARY_DIM // 2) % ROTARY_DIM
    is_turned = (o_dim < ROTARY_DIM)[None, :]
    is_dim = (o_dim < HEAD_DIM)[None, :]
    is_query = (o_head < NUM_HEADS)[:, None]
    is_kv = (o_head >= NUM_HEADS) & (o_head < NUM_HEADS + 2 * NUM_KV_HEADS)
    is_there = (is_query | is_kv[:, None]) & is_dim
    is_rotary = (o_head < NUM_HEADS + NUM_KV_HEADS)[:, None]

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

    p_cos = p_rotation + i_token * ROTARY_DIM + o_dim[None, :]
    cos = tl.load(p_cos, mask=is_turned, other=1)
    sin = tl.load(p_cos + num_tokens * ROTARY_DIM, mask=is_turned, other=0)
    b_rotated = (b_own * cos + b_other * sin).to(b_head.dtype)
    b_out = tl.where(is_rotary, b_rotated, b_head)

    p_own = p_query + (i_token * NUM_HEADS + o_head[:, None]) * HEAD_DIM + o_dim[None, :]
    tl.store(p_own, b_out, mask=is_query & is_dim)
    # A cache entry has its keys before its values, as a token has.
    block, offset = kv_slot // BLOCK_SIZE, kv_slot % BLOCK_SIZE
    o_kv = offset * 2 * NUM_KV_HEADS + o_head - NUM_HEADS
    p_kv_slot = p_kv_cache + block * BLOCK_STRIDE + o_kv[:, None] * HEAD_DIM + o_dim[None, :]
    if p_kv_scales is None:
        tl.store(p_kv_slot, b_out, mask=is_kv[:, None] & is_dim)
    else:
        b_code, b_scale = quantize(b_out.to(tl.float32), p_kv_cache.dtype.element_ty)
        tl.store(p_kv_slot, b_code, mask=is_kv[:, None] & is_dim)
        tl.store(p_kv_scales + block * SCALES_STRIDE + o_kv, b_scale, mask=is_kv)


@triton.jit
def _norm_weight(p_query_norm, p_key_norm, o_dim, is_query, is_dim):
    """[BLOCK_HEADS, BLOCK_DIM] float32: the norm weight of each head."""
    query_weight = tl.load(p_query_norm + o_dim[None, :], mask=is_dim, other=0).to(tl.float32)
    key_weight = tl.load(p_key_norm + o_dim[None, :], mask=is_dim, other=0).to(tl.float32)
    return tl.where(is_query, query_weight, key_weight)
