"""``sample_slots`` on a GPU: exact filters without a sort, in four kernels.

``stats`` finds each row's highest and lowest. ``bins`` counts and weighs what lies above a few
pivots, which brackets both thresholds. ``gather`` draws among the tokens above the bracket, which
are surely kept, and lists those inside it. ``finish`` searches the list for the thresholds, draws
among what they keep and takes the best. Rows without filters pass ``bins`` by and list nothing, and
greedy rows leave all but ``stats`` and the end of ``finish`` at once.

Thresholds are values of the logits, as dividing by the temperature keeps their order. Masses are
integers in units of 2^-40 of the highest token's, so that no order of summing matters.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.random_bits import PURPOSE_SAMPLE
from kernels.random_bits.triton import random_bits
from kernels.sample.gumbel import MAX_GAP
from kernels.sample.rows import MIN_TEMPERATURE
from kernels.sample.sentinels import NOT_FINITE, NOTHING_LEFT
from kernels.sample.slot_params import SlotParams

# All of these are yet to be measured on a card.
CHUNK = 2048  # of a row to a program; 75 of them make Qwen3's vocabulary, on 132 multiprocessors
NUM_PIVOTS = 16
PIVOT_TILE = 256  # of a chunk at a time beside all pivots
MAX_LISTED = 32768  # a bracket that holds more is searched in the row itself
BLOCK = 4096  # of a list at a time
NUM_WARPS = 4
NUM_FINISH_WARPS = 16

HIDDEN = tl.constexpr(float("-inf"))
NO_TOKEN = tl.constexpr(2**31 - 1)
GAP = tl.constexpr(MAX_GAP)
COLDEST = tl.constexpr(MIN_TEMPERATURE)
PURPOSE = tl.constexpr(PURPOSE_SAMPLE)
WRONG, EMPTY = tl.constexpr(NOT_FINITE), tl.constexpr(NOTHING_LEFT)
LOG2_E = tl.constexpr(1.4426950408889634)
MASS_UNIT = tl.constexpr(2.0**40)


@triton.jit
def _filters(p_temperature, p_top_k, p_top_p, p_min_p, slot, vocab_size):
    """→ temperature, top_k (0: none), top_p, min_p, whether thresholds must be searched."""
    temperature = tl.load(p_temperature + slot)
    top_k = tl.load(p_top_k + slot)
    top_p = tl.load(p_top_p + slot)
    min_p = tl.load(p_min_p + slot)
    top_k = tl.where(top_k < vocab_size, top_k, 0)
    is_searched = (temperature >= COLDEST) & ((top_k > 0) | (top_p < 1))
    return temperature, top_k, top_p, min_p, is_searched


@triton.jit
def _highest(p_max, row, num_chunks, CHUNKS: tl.constexpr):
    o_chunk = tl.arange(0, CHUNKS)
    return tl.max(tl.load(p_max + row * num_chunks + o_chunk, o_chunk < num_chunks, HIDDEN))


@triton.jit
def _floor(highest, temperature, min_p):
    """What min_p keeps is at least this."""
    gap = temperature * tl.log(tl.maximum(min_p, 1e-37))
    return tl.where(min_p > 0, highest + gap, HIDDEN)


@triton.jit
def _best(scores, ids):
    """The highest score and the lowest id that has it."""
    best = tl.max(scores)
    return best, tl.min(tl.where(scores == best, ids, NO_TOKEN))


@triton.jit
def _perturbed(values, ids, is_kept, highest, temperature, seed, position, choice):
    """Scores less the highest, with their noise; −inf where not kept."""
    bits = random_bits(seed, ids, position, choice, PURPOSE)
    uniform = tl.maximum((bits >> 8).to(tl.int32).to(tl.float32), 0.5) * 5.9604644775390625e-08
    noise = -tl.log(-tl.log(uniform))
    return tl.where(is_kept, (values - highest) / temperature + noise, HIDDEN)


@triton.jit
def _stats(
    p_logits,  # [S, V]
    p_adjusted,  # [S, V]
    p_max,  # [S, chunks]
    p_max_id,  # [S, chunks]
    p_min,  # [S, chunks], of what is finite
    p_is_wrong,  # [S, chunks]
    p_counts,  # [S, PIVOTS]
    p_masses,  # [S, PIVOTS]
    p_num_listed,  # [S]
    vocab_size,
    IS_ADJUSTED: tl.constexpr,
    CHUNK: tl.constexpr,
    PIVOTS: tl.constexpr,
):
    i_row, i_chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    o_token = i_chunk * CHUNK + tl.arange(0, CHUNK)
    is_token = o_token < vocab_size
    logits = tl.load(p_logits + i_row * vocab_size + o_token, is_token, 0.0)
    is_finite = tl.abs(logits) < float("inf")  # a NaN is not
    values = tl.where(is_token, logits, HIDDEN)
    if IS_ADJUSTED:
        values = tl.load(p_adjusted + i_row * vocab_size + o_token, is_token, HIDDEN)
    best, best_id = _best(values, o_token)
    o_part = i_row * tl.num_programs(1) + i_chunk
    tl.store(p_max + o_part, best)
    tl.store(p_max_id + o_part, best_id)
    tl.store(p_min + o_part, tl.min(tl.where(values > HIDDEN, values, float("inf"))))
    tl.store(p_is_wrong + o_part, 1 - tl.min(is_finite.to(tl.int32)))
    if i_chunk == 0:
        o_pivot = tl.arange(0, PIVOTS)
        tl.store(p_counts + i_row * PIVOTS + o_pivot, tl.zeros((PIVOTS,), tl.int32))
        tl.store(p_masses + i_row * PIVOTS + o_pivot, tl.zeros((PIVOTS,), tl.int64))
        tl.store(p_num_listed + i_row, 0)


@triton.jit
def _bins(
    p_adjusted,  # [S, V]
    p_slots,  # [S]
    p_temperature,
    p_top_k,
    p_top_p,
    p_min_p,
    p_max,  # [S, chunks]
    p_min,  # [S, chunks]
    p_pivots,  # [S, PIVOTS], ascending; all that min_p leaves is at least the first
    p_counts,  # [S, PIVOTS], of what is at least the pivot
    p_masses,  # [S, PIVOTS]
    vocab_size,
    num_chunks,
    CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
    TILE: tl.constexpr,
    PIVOTS: tl.constexpr,
):
    i_row, i_chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(p_slots + i_row)
    temperature, top_k, top_p, min_p, is_searched = _filters(
        p_temperature, p_top_k, p_top_p, p_min_p, slot, vocab_size
    )
    if is_searched:
        highest = _highest(p_max, i_row, num_chunks, CHUNKS)
        o_part = tl.arange(0, CHUNKS)
        lowest = tl.min(
            tl.load(p_min + i_row * num_chunks + o_part, o_part < num_chunks, float("inf"))
        )
        floor = tl.maximum(_floor(highest, temperature, min_p), lowest)
        # All tokens further below the highest than this weigh less than 1 - p together.
        reach = temperature * tl.log(vocab_size / tl.maximum(1 - top_p, 1e-9))
        reach = tl.where(top_k > 0, highest - floor, tl.minimum(highest - floor, reach))
        o_pivot = tl.arange(0, PIVOTS)
        share = 1 - o_pivot.to(tl.float32) / PIVOTS  # dense near the highest
        pivots = tl.maximum(highest - reach * (share * share), floor)
        pivots = tl.where(o_pivot == 0, floor, pivots)
        counts = tl.zeros((PIVOTS, TILE), tl.int32)
        masses = tl.zeros((PIVOTS, TILE), tl.float32)
        for start in range(0, CHUNK, TILE):
            o_token = i_chunk * CHUNK + start + tl.arange(0, TILE)
            values = tl.load(
                p_adjusted + i_row * vocab_size + o_token, o_token < vocab_size, HIDDEN
            )
            weights = tl.exp2((values - highest) * (LOG2_E / temperature))
            is_above = values[None, :] >= pivots[:, None]
            counts += is_above.to(tl.int32)
            masses += tl.where(is_above, weights[None, :], 0.0)
        units = (tl.sum(masses, 1) * MASS_UNIT).to(tl.int64)
        tl.atomic_add(p_counts + i_row * PIVOTS + o_pivot, tl.sum(counts, 1), sem="relaxed")
        tl.atomic_add(p_masses + i_row * PIVOTS + o_pivot, units, sem="relaxed")
        if i_chunk == 0:
            tl.store(p_pivots + i_row * PIVOTS + o_pivot, pivots)


@triton.jit
def _at(o_pivot, values, index):
    """values[index], 0 behind the end."""
    return tl.sum(tl.where(o_pivot == index, values, 0))


@triton.jit
def _bracket(p_pivots, p_counts, p_masses, row, top_k, top_p, PIVOTS: tl.constexpr):
    """Both thresholds lie in [low, high) → low, high, how many tokens are inside it and above it,
    the mass above it, and the mass of all that min_p leaves.

    How much top_k leaves is known within bounds only, and so is the mass that top_p asks for.
    """
    o_pivot = tl.arange(0, PIVOTS)
    pivots = tl.load(p_pivots + row * PIVOTS + o_pivot)
    counts = tl.load(p_counts + row * PIVOTS + o_pivot)
    masses = tl.load(p_masses + row * PIVOTS + o_pivot)
    low = tl.max(tl.where((counts >= top_k) & (top_k > 0), o_pivot, 0))
    high = tl.where(top_k > 0, low + 1, 0)
    if top_p < 1:
        share = top_p.to(tl.float64)
        most = share * _at(o_pivot, masses, low).to(tl.float64)
        least = share * _at(o_pivot, masses, high).to(tl.float64)
        is_below = masses.to(tl.float64) < least
        high = tl.maximum(high, tl.min(tl.where(is_below, o_pivot, PIVOTS)))
        is_enough = masses.to(tl.float64) >= most
        low = tl.where(top_k > 0, low, tl.max(tl.where(is_enough, o_pivot, 0)))
    num_above = _at(o_pivot, counts, high)
    top = tl.where(high == PIVOTS, float("inf"), _at(o_pivot, pivots, high))
    num_inside = _at(o_pivot, counts, low) - num_above
    mass_above = _at(o_pivot, masses, high)
    bottom = _at(o_pivot, pivots, low)
    return bottom, top, num_inside, num_above, mass_above, _at(o_pivot, masses, 0)


@triton.jit
def _gather(
    p_adjusted,  # [S, V]
    p_slots,  # [S]
    p_positions,  # [S]
    p_temperature,
    p_top_k,
    p_top_p,
    p_min_p,
    p_seeds,
    p_choices,
    p_max,  # [S, chunks]
    p_pivots,
    p_counts,
    p_masses,
    p_num_listed,  # [S]
    p_values,  # [S, LISTED]
    p_ids,  # [S, LISTED]
    p_best,  # [S, chunks], perturbed
    p_best_id,  # [S, chunks]
    vocab_size,
    num_chunks,
    CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
    PIVOTS: tl.constexpr,
    LISTED: tl.constexpr,
):
    i_row, i_chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(p_slots + i_row)
    temperature, top_k, top_p, min_p, is_searched = _filters(
        p_temperature, p_top_k, p_top_p, p_min_p, slot, vocab_size
    )
    if temperature >= COLDEST:
        highest = _highest(p_max, i_row, num_chunks, CHUNKS)
        o_token = i_chunk * CHUNK + tl.arange(0, CHUNK)
        values = tl.load(p_adjusted + i_row * vocab_size + o_token, o_token < vocab_size, HIDDEN)
        high = _floor(highest, temperature, min_p)
        if is_searched:
            low, high, num_inside, _above, _mass, _total = _bracket(
                p_pivots, p_counts, p_masses, i_row, top_k, top_p, PIVOTS
            )
            is_inside = (values >= low) & (values < high)
            num_here = tl.sum(is_inside.to(tl.int32))
            if (num_here > 0) & (num_inside <= LISTED):
                # In any order: what is made of the list does not depend on it.
                start = tl.atomic_add(p_num_listed + i_row, num_here, sem="relaxed")
                o_list = i_row * LISTED + start + tl.cumsum(is_inside.to(tl.int32), 0) - 1
                tl.store(p_values + o_list, values, is_inside)
                tl.store(p_ids + o_list, o_token, is_inside)
        is_drawn = (values >= high) & (values >= highest - temperature * GAP)
        best, best_id = tl.full((), HIDDEN, tl.float32), tl.full((), NO_TOKEN, tl.int32)
        if tl.max(is_drawn.to(tl.int32)) > 0:
            seed, choice = tl.load(p_seeds + slot), tl.load(p_choices + slot)
            position = tl.load(p_positions + i_row)
            best, best_id = _best(
                _perturbed(values, o_token, is_drawn, highest, temperature, seed, position, choice),
                o_token,
            )
        tl.store(p_best + i_row * num_chunks + i_chunk, best)
        tl.store(p_best_id + i_row * num_chunks + i_chunk, best_id)


@triton.jit
def _key(value):
    """int64 in the order of float32, so that halving ends whatever the values are."""
    bits = value.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@triton.jit
def _value(key):
    bits = key.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _weigh(p_values, num, low, high, highest, scale, BLOCK: tl.constexpr):
    """The number and the mass of the listed values in [low, high)."""
    count, mass = tl.full((), 0, tl.int32), tl.full((), 0, tl.int64)
    for start in range(0, num, BLOCK):
        o_list = start + tl.arange(0, BLOCK)
        values = tl.load(p_values + o_list, o_list < num, HIDDEN)
        is_inside = (values >= low) & (values < high)
        units = (tl.exp2((values - highest) * scale) * MASS_UNIT).to(tl.int64)
        count += tl.sum(is_inside.to(tl.int32))
        mass += tl.sum(tl.where(is_inside, units, 0))
    return count, mass


@triton.jit
def _search(
    p_values, num, low, high, num_low, top_k, least_mass, highest, scale, BLOCK: tl.constexpr
):
    """The highest value of [low, high) above which ``top_k`` listed tokens lie, or with 0 of it at
    least ``least_mass``; ``num_low`` are ≥ low. Any value that keeps the same tokens will do."""
    bottom, top, num_top = _key(low), tl.minimum(_key(high), _key(highest) + 1), 0
    is_by_value = True
    while (top - bottom > 1) & (num_low - num_top > 1) & (num_low > top_k):
        # Halving what lies between is quick, halving the keys is bounded.
        middle = (bottom + top) >> 1
        if is_by_value:
            middle = _key(0.5 * _value(bottom) + 0.5 * _value(top))
        middle = tl.minimum(tl.maximum(middle, bottom + 1), top - 1)
        count, mass = _weigh(p_values, num, _value(middle), high, highest, scale, BLOCK)
        is_enough = tl.where(top_k > 0, count >= top_k, mass.to(tl.float64) >= least_mass)
        bottom = tl.where(is_enough, middle, bottom)
        num_low = tl.where(is_enough, count, num_low)
        top = tl.where(is_enough, top, middle)
        num_top = tl.where(is_enough, num_top, count)
        is_by_value = not is_by_value
    return _value(bottom)


@triton.jit
def _finish(
    p_adjusted,  # [S, V]
    p_slots,  # [S]
    p_positions,  # [S]
    p_temperature,
    p_top_k,
    p_top_p,
    p_min_p,
    p_seeds,
    p_choices,
    p_max,  # [S, chunks]
    p_max_id,  # [S, chunks]
    p_is_wrong,  # [S, chunks]
    p_pivots,
    p_counts,
    p_masses,
    p_values,  # [S, LISTED]
    p_ids,  # [S, LISTED]
    p_best,  # [S, chunks]
    p_best_id,  # [S, chunks]
    p_threshold,  # [S] → the lowest of the logits that are kept, or −inf
    p_tokens,  # [S] →
    vocab_size,
    num_chunks,
    CHUNKS: tl.constexpr,
    PIVOTS: tl.constexpr,
    LISTED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i_row = tl.program_id(0).to(tl.int64)
    slot = tl.load(p_slots + i_row)
    temperature, top_k, top_p, min_p, is_searched = _filters(
        p_temperature, p_top_k, p_top_p, p_min_p, slot, vocab_size
    )
    o_chunk = tl.arange(0, CHUNKS)
    o_part = i_row * num_chunks + o_chunk
    is_chunk = o_chunk < num_chunks
    highest, token = _best(
        tl.load(p_max + o_part, is_chunk, HIDDEN), tl.load(p_max_id + o_part, is_chunk, NO_TOKEN)
    )
    threshold = tl.full((), HIDDEN, tl.float32)
    if temperature >= COLDEST:
        best, token = _best(
            tl.load(p_best + o_part, is_chunk, HIDDEN),
            tl.load(p_best_id + o_part, is_chunk, NO_TOKEN),
        )
        threshold = _floor(highest, temperature, min_p)
        if is_searched:
            low, high, num_inside, num_above, mass_above, mass_all = _bracket(
                p_pivots, p_counts, p_masses, i_row, top_k, top_p, PIVOTS
            )
            is_listed = num_inside <= LISTED
            p_list = p_adjusted + i_row * vocab_size
            num = vocab_size
            if is_listed:
                p_list = p_values + i_row * LISTED
                num = num_inside
            scale = LOG2_E / temperature
            threshold = low
            if top_k > 0:
                threshold = _search(
                    p_list,
                    num,
                    low,
                    high,
                    num_inside,
                    top_k - num_above,
                    0.0,
                    highest,
                    scale,
                    BLOCK,
                )
            if top_p < 1:
                num_kept, mass = _weigh(p_list, num, threshold, high, highest, scale, BLOCK)
                mass_all = tl.where(top_k > 0, mass_above + mass, mass_all)
                least = top_p.to(tl.float64) * mass_all.to(tl.float64) - mass_above.to(tl.float64)
                threshold = _search(
                    p_list, num, threshold, high, num_kept, 0, least, highest, scale, BLOCK
                )
            seed, choice = tl.load(p_seeds + slot), tl.load(p_choices + slot)
            position = tl.load(p_positions + i_row)
            for start in range(0, num, BLOCK):
                o_list = start + tl.arange(0, BLOCK)
                values = tl.load(p_list + o_list, o_list < num, HIDDEN)
                is_drawn = (values >= threshold) & (values < high)
                is_drawn &= values >= highest - temperature * GAP
                if tl.max(is_drawn.to(tl.int32)) > 0:
                    ids = o_list
                    if is_listed:
                        ids = tl.load(p_ids + i_row * LISTED + o_list, is_drawn, NO_TOKEN)
                    here, here_id = _best(
                        _perturbed(
                            values, ids, is_drawn, highest, temperature, seed, position, choice
                        ),
                        ids,
                    )
                    is_better = (here > best) | ((here == best) & (here_id < token))
                    best = tl.where(is_better, here, best)
                    token = tl.where(is_better, here_id, token)
    token = tl.where(highest == HIDDEN, EMPTY, token)
    is_wrong = tl.max(tl.load(p_is_wrong + o_part, is_chunk, 0)) > 0
    tl.store(p_tokens + i_row, tl.where(is_wrong, WRONG, token).to(tl.int64))
    tl.store(p_threshold + i_row, threshold)


@triton.jit
def _scores(
    p_adjusted,  # [S, V]
    p_slots,  # [S]
    p_temperature,
    p_threshold,  # [S]
    p_scores,  # [S, V] →
    vocab_size,
    CHUNK: tl.constexpr,
):
    i_row = tl.program_id(0).to(tl.int64)
    o_token = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    is_token = o_token < vocab_size
    temperature = tl.load(p_temperature + tl.load(p_slots + i_row))
    threshold = tl.load(p_threshold + i_row)
    scores = tl.load(p_adjusted + i_row * vocab_size + o_token, is_token, HIDDEN)
    if temperature >= COLDEST:
        scores = tl.where(scores >= threshold, tl.div_rn(scores, temperature), HIDDEN)
    tl.store(p_scores + i_row * vocab_size + o_token, scores, is_token)


def sample_slots(
    logits: Tensor, adjusted: Tensor, params: SlotParams, slots: Tensor, positions: Tensor
) -> Tensor:
    """As in ``slots.py``."""
    return _sample_rows(logits, adjusted, params, slots, positions)[0]


def process_slots(logits: Tensor, params: SlotParams, slots: Tensor) -> Tensor:
    """As in ``slots.py``."""
    positions = torch.zeros_like(slots, dtype=torch.int64)  # what is drawn there is for nobody
    _, thresholds = _sample_rows(logits, logits, params, slots, positions)
    scores = torch.empty_like(logits)
    num_rows, vocab_size = logits.shape
    if num_rows:
        grid = (num_rows, triton.cdiv(vocab_size, CHUNK))
        _scores[grid](
            logits,
            slots,
            params.temperature,
            thresholds,
            scores,
            vocab_size,
            CHUNK=CHUNK,
            num_warps=NUM_WARPS,
        )
    return scores


def _sample_rows(
    logits: Tensor, adjusted: Tensor, params: SlotParams, slots: Tensor, positions: Tensor
) -> tuple[Tensor, Tensor]:
    """→ tokens [S] int64, thresholds [S] float32."""
    if not all(each.is_contiguous() for each in (logits, adjusted, slots, positions)):
        raise ValueError("sample_slots takes contiguous tensors")
    num_rows, vocab_size = logits.shape
    num_chunks = triton.cdiv(vocab_size, CHUNK)

    def new(width: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(num_rows, width, dtype=dtype, device=logits.device)

    tokens, thresholds = new(1, torch.int64)[:, 0], new(1, torch.float32)[:, 0]
    if not num_rows:
        return tokens, thresholds
    maxima, max_ids = new(num_chunks, torch.float32), new(num_chunks, torch.int32)
    minima, is_wrong = new(num_chunks, torch.float32), new(num_chunks, torch.int32)
    best, best_ids = new(num_chunks, torch.float32), new(num_chunks, torch.int32)
    pivots, counts = new(NUM_PIVOTS, torch.float32), new(NUM_PIVOTS, torch.int32)
    masses, num_listed = new(NUM_PIVOTS, torch.int64), new(1, torch.int32)
    max_listed = min(MAX_LISTED, vocab_size)
    values, ids = new(max_listed, torch.float32), new(max_listed, torch.int32)
    grid = (num_rows, num_chunks)
    filters = (params.temperature, params.top_k, params.top_p, params.min_p)
    drawing = (slots, positions, *filters, params.seeds, params.choices)
    bracket = (pivots, counts, masses)
    parts = {"CHUNKS": triton.next_power_of_2(num_chunks), "PIVOTS": NUM_PIVOTS}
    _stats[grid](
        *(logits, adjusted, maxima, max_ids, minima, is_wrong, counts, masses, num_listed),
        vocab_size,
        IS_ADJUSTED=adjusted is not logits,
        CHUNK=CHUNK,
        PIVOTS=NUM_PIVOTS,
        num_warps=NUM_WARPS,
    )
    _bins[grid](
        *(adjusted, slots, *filters, maxima, minima, *bracket),
        *(vocab_size, num_chunks),
        **parts,
        CHUNK=CHUNK,
        TILE=PIVOT_TILE,
        num_warps=NUM_WARPS,
    )
    _gather[grid](
        *(adjusted, *drawing, maxima, *bracket, num_listed, values, ids, best, best_ids),
        *(vocab_size, num_chunks),
        **parts,
        CHUNK=CHUNK,
        LISTED=max_listed,
        num_warps=NUM_WARPS,
    )
    _finish[(num_rows,)](
        *(adjusted, *drawing, maxima, max_ids, is_wrong, *bracket, values, ids, best, best_ids),
        *(thresholds, tokens, vocab_size, num_chunks),
        **parts,
        LISTED=max_listed,
        BLOCK=BLOCK,
        num_warps=NUM_FINISH_WARPS,
    )
    return tokens, thresholds
