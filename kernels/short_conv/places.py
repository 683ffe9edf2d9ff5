"""The places of the tokens before those of a step, in a paged cache."""

import numpy as np
import torch
from torch import Tensor

from kernels.paged_attention import AttentionBatch, DeviceAttention
from kernels.paged_attention.device import flat_rows

NOWHERE = -1


def previous_places(
    attention: AttentionBatch | DeviceAttention, num_tokens: int, num: int
) -> Tensor:
    """The places [T, num] int64, block · block_size + offset, of the ``num`` tokens before each of
    the T tokens, the farthest first; negative before the first token of a sequence."""
    if isinstance(attention, AttentionBatch):
        return torch.from_numpy(_on_host(attention, num)).to(attention.device)
    rows = flat_rows(attention.decode, attention.chunks, num_tokens)
    row = rows.token_rows.long()
    tokens = torch.arange(num_tokens, device=row.device)
    positions = rows.starts[row] + tokens - rows.token_starts[row]
    size = attention.block_size
    seen = positions[:, None] - torch.arange(num, 0, -1, device=row.device)
    numbers = seen.clamp(min=0)
    tables = attention.tables[rows.slots[row].long()]
    blocks = tables.gather(1, numbers // size).long()
    return torch.where(seen < 0, NOWHERE, blocks * size + numbers % size)


def _on_host(batch: AttentionBatch, num: int) -> np.ndarray:
    nums = np.diff(batch.token_starts)
    rows = np.repeat(np.arange(len(nums)), nums)
    ends = (batch.num_keys - batch.token_starts[1:])[rows]
    positions = np.arange(len(rows)) + ends
    seen = positions[:, None] - np.arange(num, 0, -1)
    blocks = batch.block_tables[rows[:, None], np.maximum(seen, 0) // batch.block_size]
    places: np.ndarray = blocks * batch.block_size + seen % batch.block_size
    return np.where(seen < 0, NOWHERE, places)
