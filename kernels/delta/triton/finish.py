"""The gated norm, and the new positions."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_tokens", "num_rows"])
def finish_kernel(
    p_x,  # [T, NUM_CHANNELS + NUM_NORMS SIZE]
    p_y,  # [T, NUM_NORMS SIZE]
    p_norm,  # [SIZE], of a scan [NUM_NORMS SIZE]
    p_slots,  # [R]
    p_starts,  # [R]
    p_token_starts,  # [R]
    p_nums,  # [R]
    p_num_drafts,  # [R]
    p_positions,  # [slots]
    p_out,  # [T, NUM_NORMS SIZE]
    num_tokens,
    num_rows,
    eps,
    SCANS: tl.constexpr,
    OPENS_LAST: tl.constexpr,  # in lightning attention
    DECAYS: tl.constexpr,  # of a head: more than 1 by Kimi's rule
    NUM_CHANNELS: tl.constexpr,
    NUM_NORMS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The output of a token's head, or of a scan's group of heads, and the position of a row's
    state."""
    i_program, head = tl.program_id(0), tl.program_id(1)
    o_v = tl.arange(0, BLOCK)
    is_v = o_v < tl.where(i_program < num_tokens, SIZE, 0)
    o_token = i_program.to(tl.int64) * NUM_NORMS * SIZE + head * SIZE + o_v
    b_y = tl.load(p_y + o_token, mask=is_v, other=0)
    p_z = p_x + (i_program.to(tl.int64) + 1) * NUM_CHANNELS + o_token
    b_z = tl.load(p_z, mask=is_v, other=0).to(tl.float32)
    p_own_norm = p_norm + head * SIZE if SCANS else p_norm
    b_norm = tl.load(p_own_norm + o_v, mask=is_v, other=0).to(tl.float32)
    if SCANS and not OPENS_LAST:
        b_y *= b_z * tl.sigmoid(b_z)
    scale = 1 / tl.sqrt(tl.sum(b_y * b_y, 0) / SIZE + eps)
    b_out = b_norm * b_y * scale
    if OPENS_LAST:
        b_out *= tl.sigmoid(b_z)
    elif not SCANS:
        if DECAYS == 1:
            b_out *= b_z
        b_out = b_out * tl.sigmoid(b_z)
    tl.store(p_out + o_token, b_out.to(p_out.dtype.element_ty), mask=is_v)
    is_row = (i_program < num_rows) & (head == 0)
    num = tl.load(p_nums + i_program, mask=is_row, other=0)
    if num > 0:
        slot = tl.load(p_slots + i_program)
        end = tl.load(p_starts + i_program) + num - tl.load(p_num_drafts + i_program)
        tl.store(p_positions + slot, end)
