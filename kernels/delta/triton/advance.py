"""Rows token by token: a program advances a part of a head's matrix, a few values wide."""

import triton
import triton.language as tl

from kernels.delta.triton.inputs import end_and_copy, inputs_of


@triton.jit(do_not_specialize=["num_tokens", "interval"])
def advance_kernel(
    p_mixed,  # [I, channels]
    p_openings,  # [I, (DECAYS + 1) H]
    p_skip,  # [H] if HAS_SKIP
    p_matrices,  # [states, H, KEY_DIM, VALUE_DIM]
    p_slots,  # [R]
    p_starts,  # [R]
    p_token_starts,  # [R]
    p_nums,  # [R]
    p_num_drafts,  # [R]
    p_positions,  # [slots]
    p_copies,  # [slots]
    p_y,  # [T, H VALUE_DIM]
    num_tokens,
    interval,
    matrices_stride,  # of states
    SCANS: tl.constexpr,
    HAS_SKIP: tl.constexpr,
    DECAYS: tl.constexpr,  # of a head: 1 or KEY_DIM
    MOST_DRAFTS: tl.constexpr,
    NUM_KEYS: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    NUM_CHANNELS: tl.constexpr = 2 * NUM_KEYS * KEY_DIM + NUM_HEADS * VALUE_DIM
    i_row, head = tl.program_id(0), tl.program_id(1)
    num = tl.load(p_nums + i_row)
    if num == 0:
        return
    slot, num_kept, num_seen, first = inputs_of(p_slots, p_starts, p_positions, i_row)
    num_drafts, copy = tl.load(p_num_drafts + i_row), tl.load(p_copies + slot).to(tl.int64)
    end, copied = end_and_copy(num_kept + num, num_drafts, first, num_seen, copy, interval)
    token_start = tl.load(p_token_starts + i_row)
    o_k = tl.arange(0, BLOCK_K)
    o_v = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    is_k, is_v = o_k < KEY_DIM, o_v < VALUE_DIM
    is_valid = is_k[:, None] & is_v[None, :]
    o_matrix = (head * KEY_DIM + o_k[:, None]) * VALUE_DIM + o_v[None, :]
    p_own = p_matrices + slot * matrices_stride + o_matrix
    b_matrix = tl.load(p_own, mask=is_valid, other=0)
    o_query = head // (NUM_HEADS // NUM_KEYS) * KEY_DIM + o_k
    o_value = 2 * NUM_KEYS * KEY_DIM + head * VALUE_DIM + o_v
    for number in range(num_kept + num):
        token = token_start + number - num_kept
        place = tl.where(number < num_kept, num_tokens + i_row * MOST_DRAFTS + number, token)
        p_input = p_mixed + place.to(tl.int64) * NUM_CHANNELS
        b_query = tl.load(p_input + o_query, mask=is_k, other=0)
        b_key = tl.load(p_input + NUM_KEYS * KEY_DIM + o_query, mask=is_k, other=0)
        b_value = tl.load(p_input + o_value, mask=is_v, other=0)
        p_opening = p_openings + place.to(tl.int64) * (DECAYS + 1) * NUM_HEADS
        if DECAYS == 1:
            b_matrix *= tl.exp(tl.load(p_opening + head))
        else:
            b_decay = tl.load(p_opening + head * DECAYS + o_k, mask=is_k, other=0)
            b_matrix *= tl.exp(b_decay)[:, None]
        b_error = b_value
        if not SCANS:
            b_error -= tl.sum(b_matrix * b_key[:, None], 0)
        b_error *= tl.load(p_opening + DECAYS * NUM_HEADS + head)
        b_matrix += b_key[:, None] * b_error[None, :]
        b_y = tl.sum(b_matrix * b_query[:, None], 0)
        if HAS_SKIP:
            b_y += tl.load(p_skip + head).to(tl.float32) * b_value
        p_out = p_y + (token.to(tl.int64) * NUM_HEADS + head) * VALUE_DIM + o_v
        tl.store(p_out, b_y, mask=o_v < tl.where(number >= num_kept, VALUE_DIM, 0))
        if number + 1 == copied:
            tl.store(p_matrices + copy * matrices_stride + o_matrix, b_matrix, mask=is_valid)
        if number + 1 == end:
            tl.store(p_own, b_matrix, mask=is_valid)
