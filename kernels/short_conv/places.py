"""The places of the tokens before those of a step, in a paged cache."""

import numpy as np
import torch
from torch import Tensor

from kernels.paged_attention import AttentionBatch, ChunkRows, DecodeRows, DeviceAttention

NOWHERE = -1


def previous_places(
    attention: AttentionBatch | DeviceAttention, num_tokens: int, num: int
) -> Tensor:
    """The places [T, num] int64, block · block_size + offset, of the ``num`` tokens before each of
    the T tokens, the farthest first; negative before the first token of a sequence."""
    if isinstance(attention, AttentionBatch):
        return torch.from_numpy(_on_host(attention, num)).to(attention.device)
    decode, chunks = attention.decode, attention.chunks
    parts = []
    if decode is not None:
        parts.append(_of_decodes(decode, attention, num))
        num_tokens -= decode.num_tokens
    if chunks is not None:
        parts.append(_of_chunks(chunks, attention, num_tokens, num))
    return torch.cat(parts)


def _on_host(batch: AttentionBatch, num: int) -> np.ndarray:
    nums = np.diff(batch.token_starts)
    rows = np.repeat(np.arange(len(nums)), nums)
    ends = (batch.num_keys - batch.token_starts[1:])[rows]
    positions = np.arange(len(rows)) + ends
    seen = positions[:, None] - np.arange(num, 0, -1)
    blocks = batch.block_tables[rows[:, None], np.maximum(seen, 0) // batch.block_size]
    places: np.ndarray = blocks * batch.block_size + seen % batch.block_size
    return np.where(seen < 0, NOWHERE, places)


def _of_decodes(rows: DecodeRows, attention: DeviceAttention, num: int) -> Tensor:
    columns = torch.arange(rows.width, device=rows.slots.device)
    positions = (rows.starts[:, None] + columns).flatten()
    slots = rows.slots.repeat_interleave(rows.width)
    return _places(attention, slots, positions, num)


def _of_chunks(rows: ChunkRows, attention: DeviceAttention, num_tokens: int, num: int) -> Tensor:
    """Padding behind the last chunk counts as tokens of the last row."""
    tokens = torch.arange(num_tokens, device=rows.slots.device) + rows.token_starts[0]
    row = torch.searchsorted(rows.token_starts, tokens, right=True) - 1
    row = row.clamp(max=len(rows.slots) - 1)
    positions = rows.starts[row] + tokens - rows.token_starts[row]
    return _places(attention, rows.slots[row], positions, num)


def _places(attention: DeviceAttention, slots: Tensor, positions: Tensor, num: int) -> Tensor:
    size = attention.block_size
    seen = positions[:, None] - torch.arange(num, 0, -1, device=positions.device)
    numbers = seen.clamp(min=0)
    blocks = attention.tables[slots.long()].gather(1, numbers // size).long()
    return torch.where(seen < 0, NOWHERE, blocks * size + numbers % size)
