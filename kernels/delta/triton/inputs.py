"""The inputs of a step's rows: mixed by the convolution, and what rows leave behind of them."""

import triton
import triton.language as tl

from kernels.delta.reference import EPS

NORM_EPS = tl.constexpr(EPS)
ALL = tl.constexpr(tl.PropagateNan.ALL)


@triton.jit
def inputs_of(p_slots, p_starts, p_positions, i_row):
    """The slot of a row, the inputs that its state lacks before its tokens, 1 if it has seen the
    first token, and the position of the first input."""
    slot = tl.load(p_slots + i_row).to(tl.int64)
    start, position = tl.load(p_starts + i_row), tl.load(p_positions + slot)
    num_kept, num_seen = tl.maximum(start - position, 0), tl.maximum(position - start, 0)
    return slot, num_kept, num_seen, tl.minimum(start, position)


@triton.jit
def end_and_copy(num_inputs, num_drafts, first, num_seen, copy, interval):
    """The inputs before a row's state, and before a copy of it; 0: there is no copy."""
    end = num_inputs - num_drafts
    copied = (first + end) // interval * interval - first
    return end, tl.where((copied > num_seen) & (copy >= 0), copied, 0)


@triton.jit
def load_inputs(
    p_x, p_columns, p_kept, b_numbers, o_channels, is_valid, token_start, num_kept, num_seen,
    NUM_IN_X: tl.constexpr, NUM_CHANNELS: tl.constexpr, NUM_KEPT: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """Channels of a row's inputs by number; negative ones are columns. ``p_columns`` and ``p_kept``
    are those of the row. The arguments with a b, an o or an is are of one shape."""
    tokens = (token_start + b_numbers - num_kept).to(tl.int64)
    is_token = is_valid & (b_numbers >= num_kept) & (b_numbers >= 0)
    of_x = tl.load(p_x + tokens * NUM_IN_X + o_channels, mask=is_token, other=0)
    is_kept = is_valid & (b_numbers >= 0) & (b_numbers < num_kept)
    of_kept = tl.load(p_kept + b_numbers * NUM_KEPT + o_channels, mask=is_kept, other=0)
    columns = WIDTH - num_seen + b_numbers
    is_before = is_valid & (b_numbers < 0)
    before = tl.load(p_columns + columns * NUM_CHANNELS + o_channels, mask=is_before, other=0)
    return of_x.to(tl.float32) + of_kept + before


@triton.jit(do_not_specialize=["num_tokens", "kept_stride"])
def mix_kernel(
    p_x,  # [T, channels + H V]
    p_gates,  # [T, NUM_GATES]
    p_columns,  # [states, WIDTH, channels]
    p_kept,  # [slots, MOST_DRAFTS, channels + NUM_GATES]
    p_conv,  # [channels, WIDTH]
    p_bias,  # [channels] if HAS_BIAS
    p_decay,  # [H]
    p_dt_bias,  # [DECAYS H]
    p_norms,  # [2, KEY_DIM] if ROTATED
    p_rotation,  # [2, positions, ROTATED]
    p_slots,  # [R]
    p_starts,  # [R]
    p_token_starts,  # [R]
    p_nums,  # [R]
    p_token_rows,  # [T]
    p_positions,  # [slots]
    p_mixed,  # [I, channels]: the T tokens, then drafts of each row
    p_openings,  # [I, (DECAYS + 1) H]: the logarithms of decays, and beta, or a step
    num_tokens,
    least,  # of the limits of a step
    most,
    eps,  # of lightning attention
    sines,  # the place of p_rotation's second part
    columns_stride,  # of states
    kept_stride,  # of slots
    ROTATED: tl.constexpr,  # elements of a key in lightning attention, else 0
    SCANS: tl.constexpr,
    DECAYS: tl.constexpr,  # of a head: 1 or KEY_DIM
    HAS_BIAS: tl.constexpr,
    MOST_DRAFTS: tl.constexpr,
    NUM_KEYS: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A query, a key or a value, and with a value its head's gates."""
    NUM_CHANNELS: tl.constexpr = 2 * NUM_KEYS * KEY_DIM + NUM_HEADS * VALUE_DIM
    A_PLACE: tl.constexpr = 0 if SCANS else NUM_HEADS  # a scan has dt alone
    NUM_GATES: tl.constexpr = 0 if ROTATED else A_PLACE + DECAYS * NUM_HEADS
    NUM_KEPT: tl.constexpr = NUM_CHANNELS + NUM_GATES
    i_input, i_part = tl.program_id(0), tl.program_id(1)
    is_token = i_input < num_tokens
    if MOST_DRAFTS:
        of_kept = i_input - num_tokens
        i_row = tl.load(p_token_rows + i_input, mask=is_token, other=0)
        i_row = tl.where(is_token, i_row, of_kept // MOST_DRAFTS)
    else:
        i_row = tl.load(p_token_rows + i_input)
    slot, num_kept, num_seen, position = inputs_of(p_slots, p_starts, p_positions, i_row)
    token_start, num = tl.load(p_token_starts + i_row), tl.load(p_nums + i_row)
    number = num_kept + i_input - token_start
    is_input = i_input - token_start < num
    if MOST_DRAFTS:
        number = tl.where(is_token, number, of_kept % MOST_DRAFTS)
        is_input = (num > 0) & tl.where(is_token, is_input, number < num_kept)
    if is_input == 0:
        return
    is_value = i_part >= 2 * NUM_KEYS
    head = tl.maximum(i_part - 2 * NUM_KEYS, 0)
    first = tl.where(is_value, 2 * NUM_KEYS * KEY_DIM + head * VALUE_DIM, i_part * KEY_DIM)
    o_part = tl.arange(0, BLOCK)
    is_part = o_part < tl.where(is_value, VALUE_DIM, KEY_DIM)
    o_channel = first + o_part
    p_row_columns, p_row_kept = p_columns + slot * columns_stride, p_kept + slot * kept_stride
    b_number = tl.full([BLOCK], 0, tl.int32) + number
    b_mixed = tl.zeros([BLOCK], tl.float32)
    if HAS_BIAS:
        b_mixed += tl.load(p_bias + o_channel, mask=is_part, other=0).to(tl.float32)
    for column in tl.static_range(WIDTH):
        b_input = load_inputs(
            p_x, p_row_columns, p_row_kept, b_number + column + 1 - WIDTH, o_channel, is_part,
            token_start, num_kept, num_seen,
            NUM_CHANNELS + NUM_HEADS * VALUE_DIM, NUM_CHANNELS, NUM_KEPT, WIDTH,
        )  # fmt: skip
        b_weight = tl.load(p_conv + o_channel * WIDTH + column, mask=is_part, other=0)
        b_mixed += b_weight.to(tl.float32) * b_input
    if ROTATED:  # the convolution has a width of 1
        o_partner = tl.where(o_part < ROTATED // 2, o_part + ROTATED // 2, o_part - ROTATED // 2)
        is_turned = is_part & (o_part < tl.where(is_value, 0, ROTATED))
        b_partner = load_inputs(
            p_x, p_row_columns, p_row_kept, b_number, first + o_partner, is_turned, token_start,
            num_kept, num_seen, NUM_CHANNELS + NUM_HEADS * VALUE_DIM, NUM_CHANNELS, NUM_KEPT, WIDTH,
        )  # fmt: skip
        p_norm = p_norms + tl.where(i_part < NUM_KEYS, 0, KEY_DIM)
        is_key = o_part < tl.where(is_value, 0, KEY_DIM)
        b_norm = tl.load(p_norm + o_part, mask=is_key, other=0).to(tl.float32)
        b_partner *= tl.load(p_norm + o_partner, mask=is_turned, other=0).to(tl.float32)
        p_cos = p_rotation + (position + number).to(tl.int64) * ROTATED + o_part
        b_turned = b_norm * b_mixed * tl.load(p_cos, mask=is_turned, other=1)
        b_turned += b_partner * tl.load(p_cos + sines, mask=is_turned, other=0)
        scale = 1 / tl.sqrt(tl.sum(b_mixed * b_mixed, 0) / KEY_DIM + eps)
        scale = tl.where(i_part < NUM_KEYS, scale * KEY_DIM**-0.5, scale)
        b_mixed = tl.where(is_value, b_mixed, b_turned * scale)
    else:
        b_mixed *= tl.sigmoid(b_mixed)
    if not SCANS:
        scale = 1 / tl.sqrt(tl.sum(b_mixed * b_mixed, 0) + NORM_EPS)
        scale = tl.where(i_part < NUM_KEYS, scale * KEY_DIM**-0.5, scale)
        b_mixed *= tl.where(is_value, 1.0, scale)
    i_wide = i_input.to(tl.int64)
    tl.store(p_mixed + i_wide * NUM_CHANNELS + o_channel, b_mixed, mask=is_part)
    if is_value:
        is_seen = number < num_seen
        p_opening = p_openings + i_wide * (DECAYS + 1) * NUM_HEADS
        if ROTATED:
            o_decay, is_decay, step, beta = head, True, 1.0, 1.0
        else:
            if DECAYS == 1:
                o_decay, is_decay, is_own, is_kept = head, True, is_token, ~is_token
            else:
                o_decay, is_decay = head * DECAYS + o_part, o_part < DECAYS
                is_own = o_part < tl.where(is_token, DECAYS, 0)
                is_kept = o_part < tl.where(is_token, 0, DECAYS)
            p_own = p_gates + i_wide * NUM_GATES
            b = tl.load(p_own + head, mask=is_token, other=0).to(tl.float32)
            a = tl.load(p_own + A_PLACE + o_decay, mask=is_own, other=0).to(tl.float32)
            if MOST_DRAFTS:
                p_of_kept = p_row_kept + number * NUM_KEPT + NUM_CHANNELS
                b += tl.load(p_of_kept + head, mask=~is_token, other=0)
                a += tl.load(p_of_kept + A_PLACE + o_decay, mask=is_kept, other=0)
            a += tl.load(p_dt_bias + o_decay, mask=is_decay, other=0).to(tl.float32)
            step = tl.maximum(a, 0) + tl.log(1 + tl.exp(-tl.abs(a)))
            if SCANS:
                step = tl.minimum(tl.maximum(step, least, ALL), most, ALL)
                beta = step
            else:
                beta = tl.sigmoid(b)
        log_decay = -tl.exp(tl.load(p_decay + head).to(tl.float32)) * step
        tl.store(p_opening + o_decay, tl.where(is_seen, 0.0, log_decay), mask=is_decay)
        tl.store(p_opening + DECAYS * NUM_HEADS + head, tl.where(is_seen, 0.0, beta))


@triton.jit(do_not_specialize=["interval", "kept_stride"])
def note_kernel(
    p_x,  # [T, NUM_IN_X]
    p_gates,  # [T, NUM_GATES]
    p_columns,  # [states, WIDTH, NUM_CHANNELS]
    p_kept,  # [slots, MOST_DRAFTS, NUM_CHANNELS + NUM_GATES]
    p_slots,  # [R]
    p_starts,  # [R]
    p_token_starts,  # [R]
    p_nums,  # [R]
    p_num_drafts,  # [R]
    p_positions,  # [slots]
    p_copies,  # [slots]
    interval,
    columns_stride,  # of states
    kept_stride,  # of slots
    MOST_DRAFTS: tl.constexpr,
    NUM_CHANNELS: tl.constexpr,
    NUM_GATES: tl.constexpr,
    NUM_IN_X: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Some channels of a row's columns, and of its drafts: all are read before any is written."""
    NUM_KEPT: tl.constexpr = NUM_CHANNELS + NUM_GATES
    i_row = tl.program_id(0)
    num = tl.load(p_nums + i_row)
    if num == 0:
        return
    slot, num_kept, num_seen, first = inputs_of(p_slots, p_starts, p_positions, i_row)
    num_drafts, copy = tl.load(p_num_drafts + i_row), tl.load(p_copies + slot).to(tl.int64)
    end, copied = end_and_copy(num_kept + num, num_drafts, first, num_seen, copy, interval)
    token_start = tl.load(p_token_starts + i_row)
    o_channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    o_column = tl.arange(0, BLOCK_W)[:, None]
    is_valid = (o_column < WIDTH) & (o_channel < NUM_CHANNELS)
    p_row_columns, p_row_kept = p_columns + slot * columns_stride, p_kept + slot * kept_stride
    b_own = load_inputs(
        p_x, p_row_columns, p_row_kept, end + o_column - WIDTH, o_channel, is_valid,
        token_start, num_kept, num_seen, NUM_IN_X, NUM_CHANNELS, NUM_KEPT, WIDTH,
    )  # fmt: skip
    is_copied = (o_column < tl.where(copied > 0, WIDTH, 0)) & (o_channel < NUM_CHANNELS)
    b_copied = load_inputs(
        p_x, p_row_columns, p_row_kept, copied + o_column - WIDTH, o_channel, is_copied,
        token_start, num_kept, num_seen, NUM_IN_X, NUM_CHANNELS, NUM_KEPT, WIDTH,
    )  # fmt: skip
    tl.debug_barrier()
    o_columns = o_column * NUM_CHANNELS + o_channel
    tl.store(p_row_columns + o_columns, b_own, mask=is_valid)
    tl.store(p_columns + copy * columns_stride + o_columns, b_copied, mask=is_copied)
    if MOST_DRAFTS:
        o_draft = tl.arange(0, BLOCK_D)[:, None]
        is_draft = o_draft < num_drafts
        tokens = (token_start + num - num_drafts + o_draft).to(tl.int64)
        is_channel = is_draft & (o_channel < NUM_CHANNELS)
        b_x = tl.load(p_x + tokens * NUM_IN_X + o_channel, mask=is_channel, other=0)
        is_gate = is_draft & (o_channel >= NUM_CHANNELS) & (o_channel < NUM_KEPT)
        p_own = p_gates + tokens * NUM_GATES + o_channel - NUM_CHANNELS
        b_gates = tl.load(p_own, mask=is_gate, other=0)
        b_draft = b_x.to(tl.float32) + b_gates.to(tl.float32)
        p_draft = p_row_kept + o_draft * NUM_KEPT + o_channel
        tl.store(p_draft, b_draft, mask=is_channel | is_gate)
