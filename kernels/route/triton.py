"""``route``: one program of one warp per token. ``expert_logits``: one program per expert and some
tokens."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.route.options import Routing
from kernels.sizes import cdiv, next_power_of_2

BLOCK_TOKENS, BLOCK_INPUTS = 4, 1024
ALIGNED_BYTES = 16
LAST = tl.constexpr(-(1 << 63))  # lower than every key of a score


def launch_logits(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    (num_tokens, size), num_experts = x.shape, len(weight)
    x = x.contiguous()
    if x.data_ptr() % ALIGNED_BYTES:  # Triton would compile another layout of loads and sums
        x = x.clone()
    out = torch.empty(num_tokens, num_experts, dtype=torch.float32, device=x.device)
    if num_tokens:
        logits_kernel[num_experts, cdiv(num_tokens, BLOCK_TOKENS)](
            *(x, weight.contiguous(), bias, out, num_tokens, num_experts, size),
            *(BLOCK_TOKENS, min(BLOCK_INPUTS, next_power_of_2(size))),
            num_warps=4,
        )
    return out


def launch(logits: Tensor, routing: Routing, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    num_tokens, num_experts = logits.shape
    shape = num_tokens, routing.num_chosen
    chosen = torch.empty(shape, dtype=torch.int32, device=logits.device)
    weights = torch.empty(shape, dtype=torch.float32, device=logits.device)
    group_size = num_experts // routing.num_groups
    min_sum = -1.0 if routing.min_sum is None else routing.min_sum
    if num_tokens:
        route_kernel[num_tokens,](
            *(logits.contiguous(), bias, chosen, weights, min_sum, routing.factor),
            *(routing.num_chosen, routing.score, routing.min_sum is not None),
            *(routing.num_groups, group_size, routing.num_kept_groups, routing.group_best),
            next_power_of_2(routing.num_groups),
            next_power_of_2(group_size),
            next_power_of_2(routing.num_chosen),
            num_warps=1,
        )
    return chosen, weights


@triton.jit(do_not_specialize=["num_tokens"])
def logits_kernel(
    p_x,  # [T, SIZE]
    p_weight,  # [E, SIZE]
    p_bias,  # [E] or None
    p_out,  # [T, E] float32
    num_tokens,
    NUM_EXPERTS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Each lane adds up its own inputs, and the lanes are added at the end: the order does not
    depend on the number of tokens."""
    i_expert = tl.program_id(0)
    o_token = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    is_token = o_token < num_tokens
    o_input = tl.arange(0, BLOCK)
    b_sums = tl.zeros([BLOCK_T, BLOCK], tl.float32)
    for start in tl.range(0, SIZE, BLOCK):
        is_input = o_input < SIZE - start
        b_weight = tl.load(p_weight + i_expert * SIZE + start + o_input, mask=is_input, other=0)
        p_each = p_x + o_token.to(tl.int64)[:, None] * SIZE + start + o_input[None, :]
        b_x = tl.load(p_each, mask=is_token[:, None] & is_input[None, :], other=0)
        b_sums += b_x.to(tl.float32) * b_weight.to(tl.float32)[None, :]
    b_logits = tl.sum(b_sums, 1)
    if p_bias is not None:
        b_logits += tl.load(p_bias + i_expert).to(tl.float32)
    tl.store(p_out + o_token.to(tl.int64) * NUM_EXPERTS + i_expert, b_logits, mask=is_token)


@triton.jit
def route_kernel(
    p_logits,  # [T, E]
    p_bias,  # [E] or None
    p_chosen,  # [T, NUM_CHOSEN]
    p_weights,  # [T, NUM_CHOSEN]
    min_sum,
    factor,
    NUM_CHOSEN: tl.constexpr,
    SCORE: tl.constexpr,
    IS_DIVIDED: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    NUM_KEPT: tl.constexpr,
    GROUP_BEST: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_CHOSEN: tl.constexpr,
):
    i_token = tl.program_id(0).to(tl.int64)
    o_group, o_member = tl.arange(0, BLOCK_GROUPS), tl.arange(0, BLOCK_SIZE)
    o_expert = o_group[:, None] * GROUP_SIZE + o_member[None, :]
    is_expert = (o_group < NUM_GROUPS)[:, None] & (o_member < GROUP_SIZE)[None, :]
    p_row = p_logits + i_token * (NUM_GROUPS * GROUP_SIZE)
    b_logits = tl.load(p_row + o_expert, mask=is_expert, other=0)
    b_scores = b_logits
    if SCORE == "softmax":
        most = tl.max(tl.max(tl.where(is_expert, b_logits, -float("inf")), 1), 0)
        b_powers = tl.where(is_expert, tl.exp(b_logits - most), 0)
        b_scores = b_powers / tl.sum(tl.sum(b_powers, 1), 0)
    elif SCORE == "sigmoid":
        b_small = tl.exp(-tl.abs(b_logits))
        b_scores = tl.where(b_logits >= 0, 1.0, b_small) / (1 + b_small)
    b_ranked = b_scores
    if p_bias is not None:
        b_ranked += tl.load(p_bias + o_expert, mask=is_expert, other=0)
    b_keys = _keys(b_ranked, o_expert, is_expert)
    if NUM_KEPT < NUM_GROUPS:
        b_best = tl.max(b_keys, 1)
        b_sums = _ranked(b_best)
        if GROUP_BEST == 2:
            b_second = tl.max(tl.where(b_keys == b_best[:, None], LAST, b_keys), 1)
            b_sums += _ranked(b_second)
        b_groups = _keys(b_sums, o_group, o_group < NUM_GROUPS)
        b_left = b_groups
        for _ in tl.static_range(NUM_KEPT):
            b_left = tl.where(b_left == tl.max(b_left, 0), LAST, b_left)
        b_keys = tl.where((b_left == LAST)[:, None], b_keys, LAST)
    o_chosen = tl.arange(0, BLOCK_CHOSEN)
    b_chosen = tl.zeros([BLOCK_CHOSEN], tl.int32)
    b_weights = tl.zeros([BLOCK_CHOSEN], tl.float32)
    for i in tl.static_range(NUM_CHOSEN):
        best = tl.max(tl.max(b_keys, 1), 0)
        is_best = b_keys == best
        b_keys = tl.where(is_best, LAST, b_keys)
        weight = tl.sum(tl.sum(tl.where(is_best, b_scores, 0), 1), 0)
        b_chosen = tl.where(o_chosen == i, _index(best), b_chosen)
        b_weights = tl.where(o_chosen == i, weight, b_weights)
    is_chosen = o_chosen < NUM_CHOSEN
    if SCORE == "softmax_of_chosen":
        most = tl.max(tl.where(is_chosen, b_weights, -float("inf")), 0)
        b_weights = tl.where(is_chosen, tl.exp(b_weights - most), 0)
        b_weights /= tl.sum(b_weights, 0)
    if IS_DIVIDED:
        b_weights /= tl.maximum(tl.sum(b_weights, 0), min_sum)
    o_out = i_token * NUM_CHOSEN + o_chosen
    tl.store(p_chosen + o_out, b_chosen, mask=is_chosen)
    tl.store(p_weights + o_out, b_weights * factor, mask=is_chosen)


@triton.jit
def _keys(b_ranked, o_each, is_there):
    """Distinct integers in the order of scores, ties by lowest index; NaN is ordered too."""
    b_bits = tl.where(b_ranked == 0, 0.0, b_ranked).to(tl.int32, bitcast=True)  # -0 is 0
    b_bits = tl.where(b_bits < 0, b_bits ^ 0x7FFFFFFF, b_bits)
    b_keys = (b_bits.to(tl.int64) << 32) | (0x7FFFFFFF - o_each).to(tl.int64)
    return tl.where(is_there, b_keys, LAST)


@triton.jit
def _ranked(b_keys):
    b_bits = (b_keys >> 32).to(tl.int32)
    return tl.where(b_bits < 0, b_bits ^ 0x7FFFFFFF, b_bits).to(tl.float32, bitcast=True)


@triton.jit
def _index(key):
    return 0x7FFFFFFF - (key & 0x7FFFFFFF).to(tl.int32)
