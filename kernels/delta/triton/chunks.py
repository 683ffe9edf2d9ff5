"""Prompts in chunks, which end at absolute multiples of ``CHUNK`` positions (arXiv 2412.06464).

With g_t the sum of the logarithms of the decays up to t, the matrix before a chunk S, and

    A_ti = β_t · exp(g_t − g_i) · k_t · k_i for i < t,    M = (1 + A)⁻¹ · diag(β),
    P_ti = exp(g_t − g_i) · q_t · k_i for i ≤ t,

the chunk's changes are U = M · (V − diag(exp(g)) · K · S), its outputs diag(exp(g)) · Q · S + P · U
and the matrix after it exp(g_last) · S + Σ_t exp(g_last − g_t) · k_t ⊗ u_t. M and P of all chunks
are computed at once, then the rest of a row from chunk to chunk. Of a scan U = diag(β) · V, with
steps as β, and outputs have skip · V more, but in lightning attention.
"""

import triton
import triton.language as tl

from kernels.delta.triton.inputs import end_and_copy, inputs_of


@triton.jit
def tokens_of(chunk, start, token_start, num, CHUNK: tl.constexpr):
    """The tokens of a row in a chunk, and whether they exist. Others leave a matrix as it is."""
    o_number = chunk * CHUNK + tl.arange(0, CHUNK) - start
    return (token_start + o_number).to(tl.int64), (o_number >= 0) & (o_number < num)


@triton.jit
def sums_and_betas(p_openings, o_token, is_token, head, NUM_HEADS: tl.constexpr):
    """The sums of the logarithms of decays up to each token, and the betas."""
    p_opening = p_openings + o_token * 2 * NUM_HEADS + head
    b_sum = tl.cumsum(tl.load(p_opening, mask=is_token, other=0), 0)
    return b_sum, tl.load(p_opening + NUM_HEADS, mask=is_token, other=0)


@triton.jit
def solve_kernel(
    p_mixed,  # [I, channels]
    p_openings,  # [I, 2 H]
    p_chunk_rows,  # [chunks]: -1 is none
    p_chunks,  # [chunks]: their numbers, counted from position 0
    p_starts,  # [R]
    p_token_starts,  # [R]
    p_nums,  # [R]
    p_solved,  # [T, H, CHUNK]: M
    p_scores,  # [T, H, CHUNK]: P
    SCANS: tl.constexpr,
    NUM_KEYS: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_K: tl.constexpr,
    CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    NUM_CHANNELS: tl.constexpr = 2 * NUM_KEYS * KEY_DIM + NUM_HEADS * VALUE_DIM
    i_chunk, head = tl.program_id(0), tl.program_id(1)
    i_row = tl.load(p_chunk_rows + i_chunk)
    if i_row < 0:
        return
    o_token, is_token = tokens_of(
        tl.load(p_chunks + i_chunk), tl.load(p_starts + i_row), tl.load(p_token_starts + i_row),
        tl.load(p_nums + i_row), CHUNK,
    )  # fmt: skip
    b_sum, b_beta = sums_and_betas(p_openings, o_token, is_token, head, NUM_HEADS)
    p_row = p_mixed + o_token[:, None] * NUM_CHANNELS + head // (NUM_HEADS // NUM_KEYS) * KEY_DIM
    b_solved = tl.zeros([CHUNK, CHUNK], tl.float32)
    b_scores = tl.zeros([CHUNK, CHUNK], tl.float32)
    for first in range(0, KEY_DIM, BLOCK_K):
        o_k = first + tl.arange(0, BLOCK_K)
        is_valid = is_token[:, None] & (o_k < KEY_DIM)[None, :]
        p_query = p_row + o_k[None, :]
        b_query = tl.load(p_query, mask=is_valid, other=0)
        b_key = tl.load(p_query + NUM_KEYS * KEY_DIM, mask=is_valid, other=0)
        b_scores = tl.dot(b_query, tl.trans(b_key), b_scores, input_precision=PRECISION)
        if not SCANS:
            b_solved = tl.dot(b_key, tl.trans(b_key), b_solved, input_precision=PRECISION)
    o_t = tl.arange(0, CHUNK)
    is_seen = o_t[:, None] >= o_t[None, :]
    b_decay = tl.where(is_seen, tl.exp(tl.where(is_seen, b_sum[:, None] - b_sum[None, :], 0)), 0)
    o_out = (o_token[:, None] * NUM_HEADS + head) * CHUNK + o_t[None, :]
    tl.store(p_scores + o_out, b_scores * b_decay, mask=is_token[:, None])
    if not SCANS:
        is_before = o_t[:, None] > o_t[None, :]
        b_solved = tl.where(is_before, -b_solved * b_decay * b_beta[:, None], 0)
        for i in range(1, CHUNK):  # the rows before it are solved
            is_row = o_t[:, None] == i
            b_row = tl.sum(tl.where(is_row, b_solved, 0), 0, keep_dims=True)
            b_row += tl.sum(tl.trans(b_row) * b_solved, 0, keep_dims=True)
            b_solved = tl.where(is_row, b_row, b_solved)
        b_solved = tl.where(o_t[:, None] == o_t[None, :], 1, b_solved) * b_beta[None, :]
        tl.store(p_solved + o_out, b_solved, mask=is_token[:, None])


@triton.jit(do_not_specialize=["first_row", "interval"])
def pass_kernel(
    p_mixed,  # [I, channels]
    p_openings,  # [I, 2 H]
    p_solved,  # [T, H, CHUNK]
    p_scores,  # [T, H, CHUNK]
    p_skip,  # [H] if HAS_SKIP
    p_matrices,  # [states, H, KEY_DIM, VALUE_DIM]
    p_slots,  # [R]
    p_starts,  # [R]
    p_token_starts,  # [R]
    p_nums,  # [R]
    p_positions,  # [slots]
    p_copies,  # [slots]
    p_y,  # [T, H VALUE_DIM]
    first_row,
    interval,
    matrices_stride,  # of states
    SCANS: tl.constexpr,
    HAS_SKIP: tl.constexpr,
    NUM_KEYS: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """A row has no drafts, and its state lacks nothing before its tokens. Between chunks the matrix
    is in memory, since registers do not hold it and its products."""
    NUM_CHANNELS: tl.constexpr = 2 * NUM_KEYS * KEY_DIM + NUM_HEADS * VALUE_DIM
    i_row, head = first_row + tl.program_id(0), tl.program_id(1)
    num = tl.load(p_nums + i_row)
    if num == 0:
        return
    slot, num_kept, num_seen, start = inputs_of(p_slots, p_starts, p_positions, i_row)
    copy = tl.load(p_copies + slot).to(tl.int64)
    end, copied = end_and_copy(num_kept + num, 0, start, num_seen, copy, interval)
    token_start = tl.load(p_token_starts + i_row)
    o_t = tl.arange(0, CHUNK)
    o_v = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    is_v = o_v < VALUE_DIM
    p_own = p_matrices + slot * matrices_stride
    p_copy = p_matrices + copy * matrices_stride
    o_query = head // (NUM_HEADS // NUM_KEYS) * KEY_DIM
    o_value = 2 * NUM_KEYS * KEY_DIM + head * VALUE_DIM + o_v
    for chunk in range(start // CHUNK, (start + end - 1) // CHUNK + 1):
        o_token, is_token = tokens_of(chunk, start, token_start, num, CHUNK)
        b_sum, b_beta = sums_and_betas(p_openings, o_token, is_token, head, NUM_HEADS)
        p_row = p_mixed + o_token[:, None] * NUM_CHANNELS
        b_error = tl.zeros([CHUNK, BLOCK_V], tl.float32)
        b_y = tl.zeros([CHUNK, BLOCK_V], tl.float32)
        for first in range(0, KEY_DIM, BLOCK_K):
            o_k = first + tl.arange(0, BLOCK_K)
            o_matrix = (head * KEY_DIM + o_k[:, None]) * VALUE_DIM + o_v[None, :]
            is_valid = (o_k < KEY_DIM)[:, None] & is_v[None, :]
            b_matrix = tl.load(p_own + o_matrix, mask=is_valid, other=0)
            is_key = is_token[:, None] & (o_k < KEY_DIM)[None, :]
            p_query = p_row + o_query + o_k[None, :]
            b_query = tl.load(p_query, mask=is_key, other=0)
            b_key = tl.load(p_query + NUM_KEYS * KEY_DIM, mask=is_key, other=0)
            if not SCANS:
                b_error = tl.dot(b_key, b_matrix, b_error, input_precision=PRECISION)
            b_y = tl.dot(b_query, b_matrix, b_y, input_precision=PRECISION)
        is_value = is_token[:, None] & is_v[None, :]
        b_value = tl.load(p_row + o_value[None, :], mask=is_value, other=0)
        o_square = (o_token[:, None] * NUM_HEADS + head) * CHUNK + o_t[None, :]
        if SCANS:
            b_change = b_beta[:, None] * b_value
        else:
            b_error = b_value - tl.exp(b_sum)[:, None] * b_error
            b_solved = tl.load(p_solved + o_square, mask=is_token[:, None], other=0)
            b_change = tl.dot(b_solved, b_error, input_precision=PRECISION)
        b_scores = tl.load(p_scores + o_square, mask=is_token[:, None], other=0)
        b_y = tl.exp(b_sum)[:, None] * b_y
        b_y = tl.dot(b_scores, b_change, b_y, input_precision=PRECISION)
        if HAS_SKIP:
            b_y += tl.load(p_skip + head).to(tl.float32) * b_value
        p_out = p_y + (o_token[:, None] * NUM_HEADS + head) * VALUE_DIM + o_v[None, :]
        tl.store(p_out, b_y, mask=is_value)
        last = tl.sum(tl.where(o_t == CHUNK - 1, b_sum, 0), 0)
        b_rest = tl.exp(last - b_sum)[None, :]
        is_copied = (chunk + 1) * CHUNK - start == copied
        tl.debug_barrier()  # all have read the matrix
        for first in range(0, KEY_DIM, BLOCK_K):
            o_k = first + tl.arange(0, BLOCK_K)
            o_matrix = (head * KEY_DIM + o_k[:, None]) * VALUE_DIM + o_v[None, :]
            is_valid = (o_k < KEY_DIM)[:, None] & is_v[None, :]
            b_matrix = tl.load(p_own + o_matrix, mask=is_valid, other=0) * tl.exp(last)
            is_key = (o_k < KEY_DIM)[:, None] & is_token[None, :]
            p_key = p_mixed + o_token[None, :] * NUM_CHANNELS + o_query + o_k[:, None]
            b_key = tl.load(p_key + NUM_KEYS * KEY_DIM, mask=is_key, other=0) * b_rest
            b_matrix = tl.dot(b_key, b_change, b_matrix, input_precision=PRECISION)
            tl.store(p_own + o_matrix, b_matrix, mask=is_valid)
            if is_copied:
                tl.store(p_copy + o_matrix, b_matrix, mask=is_valid)
        tl.debug_barrier()  # all have written it
