"""``change_logits``: one program per chunk of a row; programs of rows without rules exit at
once."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.sample.slot_rules import EMITTED, IN_PROMPT, IS_END
from kernels.sizes import cdiv
from kernels.slot_state import SlotState

CHUNK = 1024  # not measured yet
NUM_WARPS = 4
HIDDEN = tl.constexpr(float("-inf"))
PROMPT_BIT, END_BIT, ONE = tl.constexpr(IN_PROMPT), tl.constexpr(IS_END), tl.constexpr(EMITTED)


def launch(logits: Tensor, state: SlotState, slots: Tensor, positions: Tensor) -> Tensor:
    if not logits.is_contiguous():
        raise ValueError("change_logits takes contiguous logits")
    changed = torch.empty_like(logits)
    num_rows, vocab_size = logits.shape
    if num_rows:
        change_kernel[num_rows, cdiv(vocab_size, CHUNK)](
            logits, slots, positions, state.ids, state.num_tokens, *state.rules, changed,
            vocab_size, state.ids.shape[1], CHUNK,
            num_warps=NUM_WARPS, enable_fp_fusion=False,
        )  # fmt: skip
    return changed


@triton.jit
def change_kernel(
    p_logits,  # [S, V]
    p_slots,  # [S]
    p_positions,  # [S]
    p_ids,  # [N, MAX_IDS]
    p_num_tokens,  # [N]
    p_is_changed,  # [N]
    p_seen,  # [N, V]
    p_biases,  # [N, V]
    p_min_ends,  # [N]
    p_repetition,  # [N]
    p_presence,  # [N]
    p_frequency,  # [N]
    p_changed,  # [S, V] →
    vocab_size,
    MAX_IDS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """No fused multiply-add: each operation is rounded as on the host."""
    i_row = tl.program_id(0).to(tl.int64)
    slot = tl.load(p_slots + i_row).to(tl.int64)
    if tl.load(p_is_changed + slot) > 0:
        o_token = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
        is_token = o_token < vocab_size
        o_table = slot * vocab_size + o_token
        b_seen = tl.load(p_seen + o_table, is_token, 0)
        position = tl.load(p_positions + i_row)
        num_before = tl.minimum(position - tl.load(p_num_tokens + slot), MAX_IDS - 1).to(tl.int32)
        for i_draft in range(num_before):
            draft = tl.load(p_ids + slot * MAX_IDS + 1 + i_draft)
            b_seen += tl.where(o_token == draft, ONE, 0)
        b_emitted = b_seen // ONE
        b_logits = tl.load(p_logits + i_row * vocab_size + o_token, is_token, 0.0)
        b_logits += tl.load(p_biases + o_table, is_token, 0.0)
        is_early = position < tl.load(p_min_ends + slot)
        b_logits = tl.where(is_early & ((b_seen & END_BIT) > 0), HIDDEN, b_logits)
        penalty = tl.load(p_repetition + slot)
        b_factor = tl.where(b_logits > 0, tl.div_rn(1.0, penalty), penalty)
        is_known = ((b_seen & PROMPT_BIT) > 0) | (b_emitted > 0)
        b_logits = tl.where(is_known, b_logits * b_factor, b_logits)
        presence, frequency = tl.load(p_presence + slot), tl.load(p_frequency + slot)
        b_penalties = (presence + frequency * b_emitted.to(tl.float64)).to(tl.float32)
        b_logits = tl.where(b_emitted > 0, b_logits - b_penalties, b_logits)
        tl.store(p_changed + i_row * vocab_size + o_token, b_logits, is_token)
