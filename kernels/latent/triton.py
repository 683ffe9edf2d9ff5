"""Operators around latent attention, as kernels."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.kv_codes import latents
from kernels.kv_codes.triton import quantize
from kernels.rms_norm import Norm
from kernels.sizes import cdiv, next_power_of_2

# Unmeasured. One size for any number of tokens, so a row's sums always have the same order; with
# few tokens a GPU is bound by reading the weights.
BLOCK_TOKENS, BLOCK_OUT, BLOCK_IN = 64, 64, 64
BLOCK_HEADS = 8
NUM_WARPS = 4
GROUP = tl.constexpr(latents.GROUP)


def product_warps(dtype: torch.dtype) -> int:
    """float32 GEMMs have no tensor cores, and their registers spill with fewer warps."""
    return 8 if dtype == torch.float32 else 4


def write_latents(
    latent: Tensor,
    norm: Norm,
    rotation: Tensor,
    slot_mapping: Tensor,
    kv_cache: Tensor,
    is_interleaved: bool,
    kv_scales: Tensor | None = None,
) -> None:
    given = latent, rotation, kv_cache, latent if kv_scales is None else kv_scales
    if not all(each.is_contiguous() for each in given):
        raise ValueError("write_latents takes contiguous latents, rotation and caches")
    num_tokens, rank = len(latent), len(norm.weight)
    rope_dim = latent.shape[1] - rank
    least = 1 if kv_scales is None else latents.GROUP
    if num_tokens:
        write_kernel[(num_tokens,)](
            latent,
            norm.weight,
            rotation,
            slot_mapping,
            kv_cache,
            kv_cache.view(latent.dtype),
            kv_scales,
            num_tokens,
            norm.eps,
            RANK=rank,
            ROPE_DIM=rope_dim,
            UNIT=latent.itemsize // kv_cache.itemsize,
            IS_INTERLEAVED=is_interleaved,
            BLOCK_RANK=max(next_power_of_2(rank), least),
            BLOCK_ROPE=next_power_of_2(rope_dim),
            num_warps=NUM_WARPS,
        )


def latent_queries(query: Tensor, keys: Tensor, rotation: Tensor, is_interleaved: bool) -> Tensor:
    num_heads, nope_dim, rank = keys.shape
    num_tokens, rope_dim = len(query), query.shape[1] // num_heads - nope_dim
    by_head = torch.unflatten(query, 1, (num_heads, -1))
    out = query.new_empty(num_tokens, num_heads, rank + rope_dim)
    _multiply(by_head[..., :nope_dim], keys.mT, out)
    if num_tokens:
        rotate_kernel[(num_tokens, cdiv(num_heads, BLOCK_HEADS))](
            query,
            rotation,
            out,
            num_tokens,
            NUM_HEADS=num_heads,
            NOPE_DIM=nope_dim,
            RANK=rank,
            ROPE_DIM=rope_dim,
            IS_INTERLEAVED=is_interleaved,
            BLOCK_HEADS=BLOCK_HEADS,
            BLOCK_ROPE=next_power_of_2(rope_dim),
            num_warps=NUM_WARPS,
        )
    return out


def latent_values(attended: Tensor, values: Tensor) -> Tensor:
    num_tokens, num_heads, _ = attended.shape
    out = attended.new_empty(num_tokens, num_heads, values.shape[1])
    _multiply(attended, values, out)
    return out.flatten(1)


def _multiply(x: Tensor, weight: Tensor, out: Tensor) -> None:
    """x [T, H, inputs] @ weight [H, outputs, inputs] → the first elements of out [T, H, ≥ outputs];
    all may be views."""
    num_tokens, num_heads, inputs = x.shape
    outputs = weight.shape[1]
    if not num_tokens:
        return
    grid = (cdiv(outputs, BLOCK_OUT), cdiv(num_tokens, BLOCK_TOKENS), num_heads)
    product_kernel[grid](
        x,
        weight,
        out,
        num_tokens,
        INPUTS=inputs,
        OUTPUTS=outputs,
        X_STRIDES=x.stride()[:2],
        WEIGHT_STRIDES=weight.stride(),
        OUT_STRIDES=out.stride()[:2],
        BLOCK_TOKENS=BLOCK_TOKENS,
        BLOCK_OUT=BLOCK_OUT,
        BLOCK_IN=BLOCK_IN,
        num_warps=product_warps(x.dtype),
    )


@triton.jit(do_not_specialize=["num_tokens"])
def write_kernel(
    p_latent,  # [T, RANK + ROPE_DIM]
    p_norm,  # [RANK]
    p_rotation,  # [2, T, ROPE_DIM] float32
    p_slot_mapping,  # [T] int64
    p_kv_cache,  # [places, RANK + ROPE_DIM * UNIT], numbers or codes
    p_keys,  # the same memory as numbers
    p_kv_scales,  # [places, num_groups] float32 | None
    num_tokens,
    eps,
    RANK: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    UNIT: tl.constexpr,  # elements of the cache for a number
    IS_INTERLEAVED: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    BLOCK_ROPE: tl.constexpr,
):
    """One program per token."""
    i_token = tl.program_id(0).to(tl.int64)
    kv_slot = tl.load(p_slot_mapping + i_token)
    o_rank, o_rope = tl.arange(0, BLOCK_RANK), tl.arange(0, BLOCK_ROPE)
    is_rank, is_rope = o_rank < RANK, o_rope < ROPE_DIM
    p_own = p_latent + i_token * (RANK + ROPE_DIM)
    p_entry = p_kv_cache + kv_slot * (RANK + ROPE_DIM * UNIT)
    b_latent = tl.load(p_own + o_rank, mask=is_rank, other=0).to(tl.float32)
    b_weight = tl.load(p_norm + o_rank, mask=is_rank, other=0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(b_latent * b_latent, 0) / RANK + eps)
    b_normed = (b_latent * scale * b_weight).to(p_latent.dtype.element_ty)
    if p_kv_scales is None:
        tl.store(p_entry + o_rank, b_normed, mask=is_rank)
    else:
        num_groups: tl.constexpr = (RANK + GROUP - 1) // GROUP
        b_groups = tl.reshape(b_normed.to(tl.float32), (BLOCK_RANK // GROUP, GROUP))
        b_code, b_scale = quantize(b_groups, p_kv_cache.dtype.element_ty)
        tl.store(p_entry + o_rank, tl.reshape(b_code, (BLOCK_RANK,)), mask=is_rank)
        o_group = tl.arange(0, BLOCK_RANK // GROUP)
        p_scale = p_kv_scales + kv_slot * num_groups + o_group
        tl.store(p_scale, b_scale, mask=o_group < num_groups)
    b_rotated = _rotated(
        p_own + RANK, p_rotation + i_token * ROPE_DIM, num_tokens * ROPE_DIM, o_rope, is_rope,
        ROPE_DIM, IS_INTERLEAVED,
    )  # fmt: skip
    p_key = p_keys + kv_slot * (RANK // UNIT + ROPE_DIM) + RANK // UNIT + o_rope
    tl.store(p_key, b_rotated.to(p_keys.dtype.element_ty), mask=is_rope)


@triton.jit(do_not_specialize=["num_tokens"])
def rotate_kernel(
    p_query,  # [T, H, NOPE_DIM + ROPE_DIM]
    p_rotation,  # [2, T, ROPE_DIM] float32
    p_out,  # [T, H, RANK + ROPE_DIM]
    num_tokens,
    NUM_HEADS: tl.constexpr,
    NOPE_DIM: tl.constexpr,
    RANK: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    IS_INTERLEAVED: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_ROPE: tl.constexpr,
):
    """One program per BLOCK_HEADS heads of a token."""
    i_token = tl.program_id(0).to(tl.int64)
    o_head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    o_rope = tl.arange(0, BLOCK_ROPE)[None, :]
    o_place = (i_token * NUM_HEADS + o_head)[:, None]
    is_there = (o_head < NUM_HEADS)[:, None] & (o_rope < ROPE_DIM)
    b_rotated = _rotated(
        p_query + o_place * (NOPE_DIM + ROPE_DIM) + NOPE_DIM, p_rotation + i_token * ROPE_DIM,
        num_tokens * ROPE_DIM, o_rope, is_there, ROPE_DIM, IS_INTERLEAVED,
    )  # fmt: skip
    p_own = p_out + o_place * (RANK + ROPE_DIM) + RANK + o_rope
    tl.store(p_own, b_rotated.to(p_out.dtype.element_ty), mask=is_there)


@triton.jit
def _rotated(
    p_x, p_cos, to_sin, o_rope, mask, ROPE_DIM: tl.constexpr, IS_INTERLEAVED: tl.constexpr
):
    o_partner = o_rope ^ 1 if IS_INTERLEAVED else (o_rope + ROPE_DIM // 2) % ROPE_DIM
    b_own = tl.load(p_x + o_rope, mask=mask, other=0).to(tl.float32)
    b_partner = tl.load(p_x + o_partner, mask=mask, other=0).to(tl.float32)
    is_dim = o_rope < ROPE_DIM
    b_cos = tl.load(p_cos + o_rope, mask=is_dim, other=0)
    b_sin = tl.load(p_cos + to_sin + o_rope, mask=is_dim, other=0)
    return b_own * b_cos + b_partner * b_sin


@triton.jit(do_not_specialize=["num_tokens"])
def product_kernel(
    p_x,  # [T, H, INPUTS]
    p_weight,  # [H, OUTPUTS, INPUTS]
    p_out,  # [T, H, OUTPUTS]
    num_tokens,
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    X_STRIDES: tl.constexpr,  # of tokens and heads
    WEIGHT_STRIDES: tl.constexpr,
    OUT_STRIDES: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
):
    """One program per tile of tokens and outputs of one head."""
    i_head = tl.program_id(2).to(tl.int64)
    o_token = tl.program_id(1).to(tl.int64) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    o_out = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    is_token, is_out = (o_token < num_tokens)[:, None], (o_out < OUTPUTS)[None, :]
    p_rows = p_x + i_head * X_STRIDES[1] + o_token[:, None] * X_STRIDES[0]
    p_columns = p_weight + i_head * WEIGHT_STRIDES[0] + o_out[None, :] * WEIGHT_STRIDES[1]
    acc = tl.zeros((BLOCK_TOKENS, BLOCK_OUT), tl.float32)
    for start in tl.range(0, INPUTS, BLOCK_IN):
        o_in = start + tl.arange(0, BLOCK_IN)
        is_in = o_in < INPUTS
        b_x = tl.load(p_rows + o_in[None, :], mask=is_token & is_in[None, :], other=0)
        p_part = p_columns + o_in[:, None] * WEIGHT_STRIDES[2]
        b_weight = tl.load(p_part, mask=is_out & is_in[:, None], other=0)
        acc = tl.dot(b_x, b_weight, acc, input_precision="ieee")
    p_own = p_out + i_head * OUT_STRIDES[1] + o_token[:, None] * OUT_STRIDES[0] + o_out[None, :]
    tl.store(p_own, acc.to(p_out.dtype.element_ty), mask=is_token & is_out)
