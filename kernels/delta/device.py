"""The rows of a step on a device, which alone knows the lengths of decode rows."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from kernels.delta.places import ranges
from kernels.delta.plain import gated_delta as on_host
from kernels.delta.states import DeltaWeights, LayerStates, StateRows
from kernels.paged_attention import ChunkRows, DecodeRows
from kernels.paged_attention.device import flat_rows

CHUNK = 64  # positions of a prompt that are computed at once, up to a multiple of it


class DeviceRows(NamedTuple):
    """R rows with some of the T tokens: decode rows, then parts of prompts, which have no drafts. A
    row without tokens is padding, or of an ended sequence; other tokens are padding, too. The
    arrays of N slots belong to one layer, which sets the positions of its states after its step."""

    slots: Tensor  # [R] int32: the number of a row's state, and of its kept drafts
    starts: Tensor  # [R] int32: the position of a row's first token
    token_starts: Tensor  # [R] int32: its place among the T tokens
    nums: Tensor  # [R] int32: the row's tokens
    num_drafts: Tensor  # [R] int32: the last of them
    token_rows: Tensor  # [T] int32: the row of each token
    chunk_rows: Tensor  # [chunks] int32: the row of each chunk of a prompt; -1: there is none
    chunks: Tensor  # [chunks] int32: its number, counted from position 0
    positions: Tensor  # [N] int32: tokens that a slot's state has seen
    copies: Tensor  # [N] int32: a slot's state for copies, behind a multiple of interval; -1: none
    num_decoding: int  # rows that may have kept drafts
    interval: int

    @property
    def chunk(self) -> int:
        """Copies are made where chunks end."""
        return math.gcd(CHUNK, self.interval)

    def on_host(self) -> StateRows:
        """Of the rows with tokens, whose tokens follow each other."""
        is_row = self.nums > 0
        slots = self.slots[is_row].long()
        starts, nums, num_drafts = (
            each[is_row].long() for each in (self.starts, self.nums, self.num_drafts)
        )
        positions = self.positions[slots].long()
        token_starts = np.concatenate([[0], np.cumsum(_array(nums))])
        return StateRows(
            starts=token_starts,
            num_drafts=_array(num_drafts),
            states=_array(slots),
            positions=_array(positions),
            num_kept=_array((starts - positions).clamp(min=0)),
            num_seen=_array((positions - starts).clamp(min=0)),
            copies=_array(self.copies[slots].long()),
            interval=self.interval,
        )


class DeviceStates(NamedTuple):
    """The states of a step's sequences on a device. ``rows`` are those of the first layer."""

    layers: Sequence[LayerStates]
    positions: Sequence[Tensor]  # of each layer
    rows: DeviceRows

    def of_layer(self, layer: int) -> tuple[LayerStates, DeviceRows]:
        return self.layers[layer], self.rows._replace(positions=self.positions[layer])


def device_rows(
    decode: DecodeRows | None,
    num_valid: Tensor,
    chunks: ChunkRows | None,
    num_tokens: int,
    positions: Tensor,
    copies: Tensor,
    interval: int,
) -> DeviceRows:
    """The rows of a step of T tokens. ``num_valid`` [B] int32 are the tokens of decode rows, 0 of a
    closed slot; the last of the N slots is the null slot, which has no state."""
    rows = flat_rows(decode, chunks, num_tokens)
    num_decoding = 0 if decode is None else len(decode.slots)
    chunk_rows = numbers = rows.token_rows[:0]
    nums = num_valid[:num_decoding]
    if chunks is not None:
        ends = chunks.token_starts
        of_chunks = torch.where(chunks.slots == len(positions) - 1, 0, ends[1:] - ends[:-1])
        nums = torch.cat((nums, of_chunks))
        size = math.gcd(CHUNK, interval)
        chunk_rows, numbers = _chunks_of(chunks.starts, of_chunks, size, num_tokens)
        chunk_rows = torch.where(chunk_rows < 0, -1, num_decoding + chunk_rows)
    num_drafts = torch.zeros_like(nums)
    num_drafts[:num_decoding] = (nums[:num_decoding] - 1).clamp(min=0)
    return DeviceRows(
        slots=rows.slots,
        starts=rows.starts,
        token_starts=rows.token_starts,
        nums=nums,
        num_drafts=num_drafts,
        token_rows=rows.token_rows,
        chunk_rows=chunk_rows,
        chunks=numbers,
        positions=positions,
        copies=copies,
        num_decoding=num_decoding,
        interval=interval,
    )


def _chunks_of(starts: Tensor, nums: Tensor, size: int, most: int) -> tuple[Tensor, Tensor]:
    """The chunks of ``size`` positions in which rows have tokens, ``most`` together: their rows and
    numbers, both int32. Behind the last chunk there are rows of -1."""
    num_rows, firsts = len(nums), starts // size
    counts = torch.where(nums > 0, (starts + nums - 1) // size - firsts + 1, 0)
    ends = counts.cumsum(0, dtype=torch.int32)
    most = min(most, most // size + 2 * num_rows)
    places = torch.arange(most, dtype=torch.int32, device=nums.device)
    row = torch.searchsorted(ends, places, right=True, out_int32=True)
    known = row.clamp(max=num_rows - 1)
    numbers = firsts[known] + places - (ends - counts)[known]
    return torch.where(row < num_rows, row, -1), numbers


def gated_delta(
    x: Tensor, gates: Tensor, weights: DeltaWeights, layer: LayerStates, rows: DeviceRows
) -> Tensor:
    """By torch's operators, on the host."""
    known = rows.on_host()
    token_starts = _array(rows.token_starts[rows.nums > 0].long())
    tokens = torch.from_numpy(ranges(token_starts, np.diff(known.starts)))
    out = x.new_zeros(len(x), x.shape[1] - len(weights.conv))
    out[tokens] = on_host(x[tokens], gates[tokens], weights, layer, known)
    ends = known.positions + known.num_kept - known.num_seen + np.diff(known.starts)
    seen = torch.from_numpy(ends - known.num_drafts)
    rows.positions[torch.from_numpy(known.states)] = seen.int()
    return out


def _array(numbers: Tensor) -> np.ndarray:
    array: np.ndarray = numbers.numpy()
    return array
