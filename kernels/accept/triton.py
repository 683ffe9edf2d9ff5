"""``accept``: one program of one warp per row, so no other program reads a slot after it
changed."""

import triton
import triton.language as tl
from torch import Tensor

from kernels.accept.output import CLOSED, FULL, RETRIED, RUNS, STOPPED, TOKENS, AcceptOutput
from kernels.random_bits import PURPOSE_ACCEPT
from kernels.random_bits.triton import random_bits
from kernels.sample import NOT_COMPILED, NOT_FINITE
from kernels.sample.slot_rules import EMITTED
from kernels.sizes import next_power_of_2
from kernels.slot_state import NO_ID, SlotState

CODE_RUNS, CODE_STOPPED, CODE_FULL = tl.constexpr(RUNS), tl.constexpr(STOPPED), tl.constexpr(FULL)
FIRST_TOKEN = tl.constexpr(TOKENS)
CODE_RETRIED, CODE_CLOSED = tl.constexpr(RETRIED), tl.constexpr(CLOSED)
NOT_FINITE_TOKEN, NO_TOKEN = tl.constexpr(NOT_FINITE), tl.constexpr(NO_ID)
NOT_COMPILED_TOKEN = tl.constexpr(NOT_COMPILED)
ACCEPT, ONE = tl.constexpr(PURPOSE_ACCEPT), tl.constexpr(EMITTED)


def launch(
    state: SlotState,
    slots: Tensor,
    num_valid: Tensor,
    tokens: Tensor,
    eos_ids: Tensor,
    acceptance: Tensor | None,
) -> AcceptOutput:
    num_rows, width = tokens.shape
    num_stops = state.stop_ids.shape[1]
    accepted = AcceptOutput(
        slots.new_empty(num_rows), slots.new_empty(num_rows, TOKENS + 2 * width - 1)
    )
    accept_kernel[num_rows,](
        slots, num_valid, tokens, eos_ids, state.ids, state.num_tokens, state.num_drafts,
        state.ends, state.is_open, state.ignores_eos, state.stop_ids, state.sampling.seeds,
        state.sampling.choices, state.rules.is_changed, state.rules.seen,
        *accepted, *tokens.stride(), acceptance, state.rules.seen.shape[1],
        state.ids.shape[1], len(eos_ids), num_stops, width,
        next_power_of_2(max(1, len(eos_ids))), next_power_of_2(num_stops),
        next_power_of_2(width), num_warps=1,
    )  # fmt: skip
    return accepted


@triton.jit
def accept_kernel(
    p_slots,  # [R]
    p_num_valid,  # [R]
    p_tokens,  # [R, WIDTH]
    p_eos_ids,  # [NUM_EOS]
    p_ids,  # [N, MAX_IDS]
    p_num_tokens,  # [N]
    p_num_drafts,  # [N]
    p_ends,  # [N]
    p_is_open,  # [N]
    p_ignores_eos,  # [N]
    p_stop_ids,  # [N, NUM_STOPS]
    p_seeds,  # [N]
    p_choices,  # [N]
    p_is_changed,  # [N]
    p_seen,  # [N, V]
    p_num_emitted,  # [R]
    p_packed,  # [R, 4 + WIDTH + WIDTH - 1]
    token_stride,
    token_step,
    p_acceptance,  # [1] or None
    vocab_size,
    MAX_IDS: tl.constexpr,
    NUM_EOS: tl.constexpr,
    NUM_STOPS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_EOS: tl.constexpr,
    BLOCK_STOPS: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    i_row = tl.program_id(0).to(tl.int64)
    slot = tl.load(p_slots + i_row).to(tl.int64)
    num_valid = tl.load(p_num_valid + i_row)
    p_row = p_tokens + i_row * token_stride
    o_w = tl.arange(0, BLOCK_W)
    is_valid = o_w < num_valid
    b_tokens = tl.load(p_row + o_w * token_step, mask=is_valid, other=0).to(tl.int32)
    first_token = tl.load(p_row).to(tl.int32)
    b_drafts = tl.load(p_ids + slot * MAX_IDS + 1 + o_w, mask=o_w < WIDTH - 1, other=0)
    num_tokens = tl.load(p_num_tokens + slot)
    room = tl.load(p_ends + slot) - num_tokens
    stops_at_eos = tl.load(p_ignores_eos + slot) == 0
    is_eos = is_among(b_tokens, p_eos_ids, NUM_EOS, BLOCK_EOS) & stops_at_eos
    is_stop = is_among(b_tokens, p_stop_ids + slot * NUM_STOPS, NUM_STOPS, BLOCK_STOPS)
    if p_acceptance is None:
        is_right = b_drafts == b_tokens
    else:
        seed, choice = tl.load(p_seeds + slot), tl.load(p_choices + slot)
        is_right = is_drawn(seed, num_tokens + o_w, choice, tl.load(p_acceptance))

    num_right = first(~is_right | (o_w + 1 >= num_valid), o_w, BLOCK_W)
    num_good = first(b_tokens < 0, o_w, BLOCK_W)
    num_to_end = first((is_eos | is_stop) & is_valid, o_w, BLOCK_W) + 1
    num_emitted = tl.minimum(tl.minimum(1 + num_right, num_good), tl.minimum(num_to_end, room))
    is_there = num_valid > 0
    num_emitted = tl.where(is_there, num_emitted, 0)
    is_retried = (first_token == NOT_FINITE_TOKEN) & (num_valid > 1)
    is_retried = is_retried | (first_token == NOT_COMPILED_TOKEN)
    code = tl.where(room == num_emitted, CODE_FULL, CODE_RUNS)
    code = tl.where(num_to_end == num_emitted, CODE_STOPPED, code)
    code = tl.where(num_good == 0, first_token, code)
    code = tl.where(is_retried, CODE_RETRIED, code)
    code = tl.where(is_there, code, CODE_CLOSED)
    goes_on = (code == CODE_RUNS) | (code == CODE_RETRIED)
    last_token = tl.sum(tl.where(o_w == num_emitted - 1, b_tokens, 0), 0)

    tl.store(p_num_emitted + i_row, num_emitted)
    p_packed += i_row * (FIRST_TOKEN + 2 * WIDTH - 1)
    tl.store(p_packed, num_emitted)
    tl.store(p_packed + 1, tl.minimum(num_right, num_emitted))
    tl.store(p_packed + 2, code)
    tl.store(p_packed + 3, num_valid)
    tl.store(p_packed + FIRST_TOKEN + o_w, b_tokens, mask=o_w < WIDTH)
    tl.store(p_packed + FIRST_TOKEN + WIDTH + o_w, b_drafts, mask=o_w < WIDTH - 1)
    # Several programs may have the null slot; they store equal values there.
    tl.store(p_ids + slot * MAX_IDS, last_token, mask=num_emitted > 0)
    tl.store(p_num_tokens + slot, num_tokens + num_emitted)
    tl.store(p_num_drafts + slot, 0)
    tl.store(p_is_open + slot, 0, mask=~goes_on)
    num_noted = tl.where(tl.load(p_is_changed + slot) > 0, num_emitted, 0)
    p_noted = p_seen + slot * vocab_size + b_tokens
    tl.atomic_add(p_noted, ONE, mask=o_w < num_noted, sem="relaxed")


@triton.jit
def is_among(b_tokens, p_ids, NUM: tl.constexpr, BLOCK: tl.constexpr):
    """[BLOCK_W] bool: the tokens found in ``p_ids`` [NUM]; negative tokens are never found."""
    o_ids = tl.arange(0, BLOCK)
    b_ids = tl.load(p_ids + o_ids, mask=o_ids < NUM, other=NO_TOKEN)
    is_same = b_tokens[:, None] == b_ids[None, :]
    return (tl.max(is_same.to(tl.int32), 1) > 0) & (b_tokens >= 0)


@triton.jit
def is_drawn(seed, b_positions, choice, acceptance):
    drawn = random_bits(seed, tl.zeros_like(b_positions), b_positions, choice, ACCEPT)
    return (drawn >> 8).to(tl.float32) * (2.0**-24) < acceptance


@triton.jit
def first(b_flags, o_w, BLOCK_W: tl.constexpr):
    """The index of the first true flag, or a value above any width if all are false."""
    return tl.min(tl.where(b_flags, o_w, BLOCK_W + 1), 0)
