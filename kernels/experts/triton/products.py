"""GEMMs with the experts' weights: a program multiplies some rows of one expert's weight with a
block of pairs. As in ``linear`` the weight is the left operand."""

import triton
import triton.language as tl

from kernels.linear.triton import multiply, store_gated, store_squares


@triton.jit(do_not_specialize=["most"])
def gate_up_kernel(
    p_x,  # [T, K]
    p_pairs,  # [P]
    p_blocks,  # [3, most]
    p_num_blocks,  # [1]
    p_weight,  # [E, PARTS I, K], or codes [E, PARTS I, K / PER_PLACE]
    p_scales,  # [E, PARTS I, groups], or None if dense
    p_zeros,  # [E, PARTS I, groups] or None
    p_table,  # [16] or None
    p_order,  # [E, K] or None
    p_bias,  # [E, PARTS I] or None
    p_gated,  # [P, I], in the order of the pairs
    most,
    NUM_CHOSEN: tl.constexpr,
    PARTS: tl.constexpr,  # 1: there are no gates
    I: tl.constexpr,  # noqa: E741
    K: tl.constexpr,
    KIND: tl.constexpr,
    PER_PLACE: tl.constexpr,
    FIRST: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_T: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
):
    """Half of a program's rows are gates, if there are any, the other half their ups."""
    i_block = tl.program_id(1)
    if i_block >= tl.load(p_num_blocks):
        return
    i_expert, first, num_pairs = _block(p_blocks, i_block, most)
    o_t = tl.arange(0, BLOCK_T)
    is_pair = o_t < num_pairs
    o_token = tl.load(p_pairs + first + o_t, mask=is_pair, other=0) // NUM_CHOSEN
    BLOCK_I: tl.constexpr = BLOCK_ROWS // PARTS
    first_row = tl.program_id(0) * BLOCK_I
    o_row = tl.arange(0, BLOCK_ROWS)
    o_row = tl.minimum(first_row + o_row % BLOCK_I, I - 1) + (o_row // BLOCK_I) * I
    b_both = _multiply_expert(
        p_x, p_weight, p_scales, p_zeros, p_table, p_order, i_expert, o_token, is_pair, o_row,
        PARTS * I, K, KIND, PER_PLACE, FIRST, GROUP, BLOCK_ROWS, BLOCK_K, BLOCK_T,
    )  # fmt: skip
    p_out = p_gated + first.to(tl.int64) * I
    if p_bias is not None:
        p_bias += i_expert * (PARTS * I)
    if PARTS == 1:
        store_squares(p_bias, p_out, b_both, first_row, num_pairs, I, BLOCK_I, BLOCK_T)
    else:
        store_gated(
            p_bias, p_out, b_both, first_row, num_pairs, I, BLOCK_I, BLOCK_T, ALPHA, 0.0, LIMIT
        )


@triton.jit(do_not_specialize=["most"])
def down_kernel(
    p_gated,  # [P, K], in the order of the pairs
    p_pairs,  # [P]
    p_blocks,  # [3, most]
    p_num_blocks,  # [1]
    p_weight,  # [E, N, K], or codes [E, N, K / PER_PLACE]
    p_scales,  # [E, N, groups], or None if dense
    p_zeros,  # [E, N, groups] or None
    p_table,  # [16] or None
    p_order,  # [E, K] or None
    p_bias,  # [E, N] or None
    p_weights,  # [P]: the weight of an expert for a token
    p_parts,  # [P, N], token by token
    most,
    N: tl.constexpr,
    K: tl.constexpr,
    KIND: tl.constexpr,
    PER_PLACE: tl.constexpr,
    FIRST: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    i_block = tl.program_id(1)
    if i_block >= tl.load(p_num_blocks):
        return
    i_expert, first, num_pairs = _block(p_blocks, i_block, most)
    o_t = tl.arange(0, BLOCK_T)
    is_pair = o_t < num_pairs
    o_n = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    p_x = p_gated + first.to(tl.int64) * K
    b_out = _multiply_expert(
        p_x, p_weight, p_scales, p_zeros, p_table, p_order, i_expert, o_t, is_pair,
        tl.minimum(o_n, N - 1),
        N, K, KIND, PER_PLACE, FIRST, GROUP, BLOCK_ROWS, BLOCK_K, BLOCK_T,
    )  # fmt: skip
    if p_bias is not None:
        b_bias = tl.load(p_bias + i_expert * N + o_n, mask=o_n < N, other=0)
        b_out += b_bias.to(tl.float32)[:, None]
    o_pair = tl.load(p_pairs + first + o_t, mask=is_pair, other=0)
    b_out *= tl.load(p_weights + o_pair, mask=is_pair, other=0)[None, :]
    o_out = o_pair.to(tl.int64)[None, :] * N + o_n[:, None]
    is_out = (o_n < N)[:, None] & is_pair[None, :]
    tl.store(p_parts + o_out, b_out.to(p_parts.dtype.element_ty), mask=is_out)


@triton.jit
def _block(p_blocks, i_block, most):
    """A block's expert, first place and number of pairs."""
    first = tl.load(p_blocks + most + i_block)
    return tl.load(p_blocks + i_block), first, tl.load(p_blocks + 2 * most + i_block) - first


@triton.jit
def _multiply_expert(
    p_x,
    p_weight,
    p_scales,
    p_zeros,
    p_table,
    p_order,
    i_expert,
    o_token,  # [BLOCK_T], rows of x
    is_token,  # [BLOCK_T]
    o_row,  # [BLOCK_ROWS], of the expert's weight
    N: tl.constexpr,
    K: tl.constexpr,
    KIND: tl.constexpr,
    PER_PLACE: tl.constexpr,
    FIRST: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """[BLOCK_ROWS, BLOCK_T] in float32"""
    STRIDE: tl.constexpr = K // PER_PLACE
    NUM_GROUPS: tl.constexpr = (K + GROUP - 1) // GROUP
    i_expert = i_expert.to(tl.int64)
    p_weight += i_expert * (N * STRIDE)
    if p_scales is not None:
        p_scales += i_expert * (N * NUM_GROUPS)
    if p_zeros is not None:
        p_zeros += i_expert * (N * NUM_GROUPS)
    if p_order is not None:
        p_order += i_expert * K
    return multiply(
        p_x, p_weight, p_scales, p_zeros, p_table, p_order, o_token, is_token, o_row,
        K, STRIDE, KIND, PER_PLACE, FIRST, GROUP, BLOCK_ROWS, BLOCK_K, BLOCK_T,
    )  # fmt: skip
