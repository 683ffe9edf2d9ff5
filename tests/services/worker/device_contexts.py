"""Steps prepared by the host, converted to lengths known only to the device."""

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kernels.paged_attention import (
    ChunkRows,
    DecodeRows,
    DeviceAttention,
    make_tiles,
)
from services.worker.layers.context import current_context, forward_context
from services.worker.models import CausalLM

MAX_KV_HEADS = 8


class OnDevice(CausalLM):
    """``model`` with DeviceAttentions in place of its context's AttentionBatches."""

    clears_blocks = False

    def __init__(self, model: CausalLM) -> None:
        super().__init__()
        self._model = model

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        context = current_context()
        groups = [
            each._replace(attention=_device_attention(each.attention)) for each in context.groups
        ]
        with forward_context(replace(context, groups=groups)):
            return self._model(input_ids, positions)

    def logits(self, hidden: Tensor) -> Tensor:
        return self._model.logits(hidden)


def _device_attention(batch: Any) -> DeviceAttention:
    num_tokens = np.diff(batch.token_starts)
    starts = batch.num_keys - num_tokens
    tables = _int32(batch.block_tables)
    num_decoding = int((num_tokens == 1).sum())
    slots = torch.arange(len(starts), dtype=torch.int32)
    rows = slots[:num_decoding], _int32(starts[:num_decoding])
    arrivals = torch.zeros(num_decoding * MAX_KV_HEADS, dtype=torch.int32)
    decode = DecodeRows(1, *rows, arrivals)
    chunk_starts, chunk_nums = starts[num_decoding:], num_tokens[num_decoding:]
    token_starts = num_decoding + np.concatenate([[0], np.cumsum(chunk_nums)])
    tile_rows, tile_starts = map(_int32, make_tiles(chunk_nums))
    chunks = ChunkRows(
        slots[num_decoding:],
        _int32(token_starts),
        _int32(chunk_starts),
        tile_rows,
        tile_starts,
        chunk_starts,
        token_starts,
    )
    return DeviceAttention(
        tables,
        decode if num_decoding else None,
        chunks if len(chunk_nums) else None,
        batch.block_size,
        int(batch.num_keys[:num_decoding].max(initial=0)),
    )


def _int32(array: np.ndarray) -> Tensor:
    return torch.from_numpy(array.astype(np.int32))
