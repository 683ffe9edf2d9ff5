"""Runs steps of all kinds before the first request, to compile all kernels: a compilation during a
step would delay all sequences by a second or more."""

import numpy as np
import torch

from kernels.experts.blocks import MANY_TOKENS
from kernels.grammar_mask import hide
from kernels.linear import FEW_TOKENS
from services.worker.engine.device.chunks import prepare_chunks
from services.worker.engine.device.mixed_step import MixedStep
from services.worker.engine.device.segments import Segments
from services.worker.engine.device.steps import DecodeStep
from services.worker.machine.streams import upload
from services.worker.slots.table import SlotTable
from services.worker.step.parts import Pooler
from services.worker.step.rows import Rows
from services.worker.step.sampler import Adjusted
from services.worker.weights.progress import Progress
from shared.wire.messages import Capacity, Pooling, SamplingParams


def warm_up(
    segments: Segments,
    table: SlotTable,
    capacity: Capacity,
    progress: Progress,
    pooler: Pooler | None = None,
) -> None:
    """The first step is the largest possible. ``table`` has only the null block. With a ``pooler``
    no step samples."""
    progress("measuring the largest step", 0.0)
    if pooler is None:
        _run_largest(segments, table, capacity)
    else:
        _pool_largest(segments, table, capacity, pooler)
    for num_tokens in (FEW_TOKENS + 1, MANY_TOKENS):  # experts have other blocks for them
        if num_tokens < capacity.max_num_batched_tokens:
            nums = _nums_of_chunks(segments, table, capacity, num_tokens)
            _chunks(segments, table, _rows_of(nums, np.zeros(0, np.int64))).forward()
    shapes = _small_shapes(segments.state.max_drafts)
    for index, (num_rows, width) in enumerate(shapes):
        progress("compiling kernels", index / len(shapes))
        _decode(segments, num_rows, width, samples=pooler is None)


def _small_shapes(max_drafts: int) -> list[tuple[int, int]]:
    """(rows, tokens per row). GEMMs of few tokens are compiled for powers of two of tokens; kernels
    that loop over a row's tokens for each number of these, for one row and for several."""
    widths = [(num_rows, 1 + depth) for depth in range(1, 1 + max_drafts) for num_rows in (1, 2)]
    powers = [(1 << power, 1) for power in range(FEW_TOKENS.bit_length())]
    return powers + widths


def padding_step(segments: Segments, num_rows: int, width: int) -> DecodeStep:
    """A step of padding rows (the null slot)."""
    null_slot = len(segments.state.is_open) - 1
    slots = torch.full_like(segments.state.is_open[:1], null_slot).repeat(num_rows)
    return DecodeStep(segments, slots, torch.zeros_like(slots), width, width)


def _decode(segments: Segments, num_rows: int, width: int, samples: bool) -> None:
    step = padding_step(segments, num_rows, width)
    step.forward()
    if not samples:
        return
    step.sample_and_accept(None)
    if segments.drafts:
        step.draft(segments.state.max_drafts)


def _run_largest(segments: Segments, table: SlotTable, capacity: Capacity) -> None:
    """Runs a prefill chunk of every sequence, samples from masked logits, and drafts."""
    state = segments.state
    nums = _nums_of_chunks(segments, table, capacity)
    step = _chunks(segments, table, _rows_of(nums, np.arange(len(nums))))
    state.num_tokens[: len(nums)] = upload(nums, state.num_tokens.device)
    state.ends[: len(nums)] = table.max_len
    logits = step.forward().clone()
    all_ids = upload(np.full((1, -(-logits.shape[1] // 32)), -1, np.int32), logits.device)
    first = torch.zeros_like(all_ids[0, :1], dtype=torch.int64)
    hide(logits, first, all_ids)
    step.sample_and_accept(Adjusted(logits, np.zeros(1, np.int64)))
    if segments.drafts:
        step.draft(state.max_drafts)


def _pool_largest(segments: Segments, table: SlotTable, capacity: Capacity, pooler: Pooler) -> None:
    """Runs a whole prompt of every sequence and pools all of its states."""
    nums = _nums_of_chunks(segments, table, capacity)
    rows = _rows_of(nums, np.zeros(0, np.int64))
    step = _chunks(segments, table, rows)
    step.forward()
    table.prompt_lens[:] = nums
    table.params = [SamplingParams(seed=0, max_tokens=0, pooling=Pooling("mean"))] * len(nums)
    pooler.pool(table, rows, step.hidden)


def _nums_of_chunks(
    segments: Segments, table: SlotTable, capacity: Capacity, num_tokens: int | None = None
) -> np.ndarray:
    """Tokens of each sequence's chunk in a step of ``num_tokens``, by default the largest one."""
    num_rows, num_tokens = capacity.max_num_seqs, num_tokens or capacity.max_num_batched_tokens
    nums = np.full(num_rows, num_tokens // num_rows)
    nums[: num_tokens % num_rows] += 1
    nums = np.minimum(nums, table.max_len - 1 - segments.state.max_drafts)
    most: np.ndarray = nums[nums > 0]
    return most


def _rows_of(nums: np.ndarray, sampling_rows: np.ndarray) -> Rows:
    """Chunks of ``nums`` [C] tokens."""
    zeros = np.zeros(len(nums), np.int64)
    return Rows(
        slots=np.arange(len(nums)),
        starts=zeros,
        num_tokens=nums,
        num_drafts=zeros,
        num_recomputed=zeros,
        sampling_rows=sampling_rows,
    )


def _chunks(segments: Segments, table: SlotTable, rows: Rows) -> MixedStep:
    state = segments.state
    chunks = prepare_chunks(table, rows, num_decoded=0, device=segments.kv_cache.device)
    decoding = chunks.slots[:0]
    return MixedStep(
        segments=segments,
        decoding=decoding,
        depths=decoding,
        width=1 + state.max_drafts,
        max_keys=table.max_len,
        chunks=chunks,
    )
