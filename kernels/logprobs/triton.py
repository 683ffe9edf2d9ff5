"""``logprobs_slots`` on a GPU: the best tokens of each chunk of a row, then the best of all
chunks."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.logprobs.num_logprobs import MAX_TOP, NO_LOGPROBS
from kernels.sizes import cdiv, next_power_of_2

# None of these sizes is measured yet.
CHUNK = 2048  # of a row, per program: 75 chunks for Qwen3's vocabulary, on 132 multiprocessors
NUM_WARPS = 4
NUM_JOIN_WARPS = 16

KEPT = next_power_of_2(MAX_TOP)  # room for a chunk's best
TOP = tl.constexpr(MAX_TOP)
NONE_ASKED = tl.constexpr(NO_LOGPROBS)
HIDDEN = tl.constexpr(float("-inf"))
LAST_ID = tl.constexpr(0x7FFFFFFF)
LEAST_KEY = tl.constexpr(-(2**63))


@triton.jit
def _keys(values, ids):
    """int64 keys in the order of value, then of lower id; both zeros are equal."""
    bits = tl.where(values == 0, 0.0, values).to(tl.int32, bitcast=True)
    ordered = (bits ^ ((bits >> 31) & LAST_ID)).to(tl.int64)
    return (ordered << 32) | (ids ^ LAST_ID).to(tl.int64)


@triton.jit
def _values(keys):
    bits = (keys >> 32).to(tl.int32)
    return (bits ^ ((bits >> 31) & LAST_ID)).to(tl.float32, bitcast=True)


@triton.jit
def _ids(keys):
    return (keys & LAST_ID).to(tl.int32) ^ LAST_ID


@triton.jit
def _top(keys, KEPT: tl.constexpr):
    """The TOP highest of distinct keys, descending, padded with the lowest key: [KEPT]."""
    o_kept = tl.arange(0, KEPT)
    kept = tl.full((KEPT,), LEAST_KEY, tl.int64)
    for i_kept in range(TOP):
        best = tl.max(keys)
        kept = tl.where(o_kept == i_kept, best, kept)
        keys = tl.where(keys == best, LEAST_KEY, keys)
    return kept


@triton.jit
def _parts(
    p_logits,  # [S, V]
    p_tokens,  # [S]
    p_wants,  # [N]
    p_slots,  # [S]
    p_max,  # [S, chunks] →
    p_sum,  # [S, chunks] → sum of exp(logit − chunk maximum)
    p_num_likelier,  # [S, chunks] →
    p_keys,  # [S, chunks, KEPT] →
    vocab_size,
    CHUNK: tl.constexpr,
    KEPT: tl.constexpr,
):
    i_row, i_chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if tl.load(p_wants + tl.load(p_slots + i_row)) != NONE_ASKED:
        p_row = p_logits + i_row * vocab_size
        o_token = i_chunk * CHUNK + tl.arange(0, CHUNK)
        is_token = o_token < vocab_size
        logits = tl.load(p_row + o_token, is_token, HIDDEN)
        token = tl.load(p_tokens + i_row)
        own = tl.load(p_row + token, token >= 0, HIDDEN)
        best = tl.max(logits)
        base = tl.where(best == HIDDEN, 0.0, best)
        o_part = i_row * tl.num_programs(1) + i_chunk
        tl.store(p_max + o_part, best)
        tl.store(p_sum + o_part, tl.sum(tl.exp(logits - base)))
        tl.store(p_num_likelier + o_part, tl.sum((logits > own).to(tl.int32)))
        keys = tl.where(is_token, _keys(logits, o_token), LEAST_KEY)
        tl.store(p_keys + o_part * KEPT + tl.arange(0, KEPT), _top(keys, KEPT))


@triton.jit
def _join(
    p_logits,  # [S, V]
    p_tokens,  # [S]
    p_wants,  # [N]
    p_slots,  # [S]
    p_max,  # [S, chunks]
    p_sum,  # [S, chunks]
    p_num_likelier,  # [S, chunks]
    p_keys,  # [S, chunks, KEPT]
    p_values,  # [S, 1 + TOP] →
    p_top_ids,  # [S, TOP] →
    p_ranks,  # [S] →
    vocab_size,
    num_chunks,
    CHUNKS: tl.constexpr,
    KEPT: tl.constexpr,
):
    i_row = tl.program_id(0).to(tl.int64)
    if tl.load(p_wants + tl.load(p_slots + i_row)) != NONE_ASKED:
        o_chunk = tl.arange(0, CHUNKS)
        is_chunk = o_chunk < num_chunks
        o_part = i_row * num_chunks + o_chunk
        maxima = tl.load(p_max + o_part, is_chunk, HIDDEN)
        highest = tl.max(maxima)
        sums = tl.load(p_sum + o_part, is_chunk, 0.0)
        normaliser = tl.log(tl.sum(tl.exp(maxima - highest) * sums)) + highest
        token = tl.load(p_tokens + i_row)
        own = tl.load(p_logits + i_row * vocab_size + token, token >= 0, HIDDEN)
        tl.store(p_values + i_row * (1 + TOP), own - normaliser)
        tl.store(p_ranks + i_row, 1 + tl.sum(tl.load(p_num_likelier + o_part, is_chunk, 0)))
        o_key = tl.arange(0, CHUNKS * KEPT)
        is_key = o_key < num_chunks * KEPT
        keys = tl.load(p_keys + i_row * num_chunks * KEPT + o_key, is_key, LEAST_KEY)
        top = _top(keys, KEPT)
        o_top = tl.arange(0, KEPT)
        is_top = o_top < TOP
        tl.store(p_values + i_row * (1 + TOP) + 1 + o_top, _values(top) - normaliser, is_top)
        tl.store(p_top_ids + i_row * TOP + o_top, _ids(top), is_top)


def logprobs_slots(
    logits: Tensor, tokens: Tensor, wants: Tensor, slots: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """As in ``kernels.logprobs``."""
    if not all(each.is_contiguous() for each in (logits, tokens, slots)):
        raise ValueError("logprobs_slots takes contiguous tensors")
    num_rows, vocab_size = logits.shape
    num_chunks = cdiv(vocab_size, CHUNK)

    def new(dtype: torch.dtype, *shape: int) -> Tensor:
        return torch.empty(num_rows, *shape, dtype=dtype, device=logits.device)

    outputs = new(torch.float32, 1 + MAX_TOP), new(torch.int32, MAX_TOP), new(torch.int32)
    if not num_rows:
        return outputs
    asked = (logits, tokens, wants, slots)
    parts = (
        new(torch.float32, num_chunks),
        new(torch.float32, num_chunks),
        new(torch.int32, num_chunks),
        new(torch.int64, num_chunks, KEPT),
    )
    _parts[(num_rows, num_chunks)](
        *asked, *parts, vocab_size, CHUNK=CHUNK, KEPT=KEPT, num_warps=NUM_WARPS
    )
    _join[(num_rows,)](
        *(*asked, *parts, *outputs, vocab_size, num_chunks),
        CHUNKS=next_power_of_2(num_chunks),
        KEPT=KEPT,
        num_warps=NUM_JOIN_WARPS,
    )
    return outputs
