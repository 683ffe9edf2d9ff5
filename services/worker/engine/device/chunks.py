"""Prompt chunks as tensors; the host knows their ids and lengths."""

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from kernels.paged_attention import ChunkRows, make_tiles
from kernels.slot_state import SlotState
from services.worker.machine.streams import upload, upload_rows
from services.worker.slots.table import SlotTable
from services.worker.step.rows import Rows


@dataclass(frozen=True, slots=True)
class Chunks:
    """C chunks with T tokens. P chunks reach the end of the known ids and sample a token."""

    slots: Tensor  # [C] int32
    nums: Tensor  # [C] int32: number of tokens
    input_ids: Tensor  # [T] int32
    positions: Tensor  # [T] int64
    # [G, T] int64: block * block_size + offset that a token's KV goes to in each group of layers
    slot_mapping: Tensor
    next_ids: Tensor  # [T] int32: the id after each token, if known
    next_slot_mapping: Tensor  # [G, T] int64
    rows: ChunkRows
    sampling_slots: Tensor  # [P] int32
    last_tokens: Tensor  # [P] int64, indices into T: last tokens of sampling chunks

    def pair_rows(self, state: SlotState) -> ChunkRows:
        """The rows of the MTP head's pairs; each pair is one position after its token."""
        first_keys = state.mtp_starts[self.slots.long()]
        return replace(
            self.rows,
            starts=self.rows.starts + 1,
            host_starts=self.rows.host_starts + 1,
            first_keys=first_keys,
        )


def prepare_chunks(
    table: SlotTable, chunks: Rows, num_decoded: int, device: torch.device
) -> Chunks:
    """The chunks follow ``num_decoded`` tokens of decode rows."""
    slots, nums, starts, ends = chunks.slots, chunks.num_tokens, chunks.starts, chunks.token_ends
    rows = np.repeat(np.arange(len(slots)), nums)  # [T]
    offsets = np.arange(len(rows)) - (ends - nums)[rows]
    positions = offsets + starts[rows]
    slot_mapping = table.slot_mapping(slots[rows], positions)
    slot_mapping[:, offsets < chunks.num_recomputed[rows]] = table.null_block * table.block_size
    next_slot_mapping = table.slot_mapping(slots[rows], positions + 1)
    ids = table.ids[slots[rows], positions], table.ids[slots[rows], positions + 1]
    longs = upload_rows(positions, *slot_mapping, *next_slot_mapping, device=device)
    end = 1 + len(slot_mapping)
    ints = upload_rows(*ids, device=device)
    numbers = (each.astype(np.int32) for each in (slots, nums, starts))
    by_row = upload_rows(*numbers, device=device)
    token_starts = num_decoded + np.concatenate([[0], ends])
    tile_rows, tile_starts = upload_rows(*make_tiles(nums), device=device)
    return Chunks(
        slots=by_row[0],
        nums=by_row[1],
        input_ids=ints[0],
        positions=longs[0],
        slot_mapping=longs[1:end],
        next_ids=ints[1],
        next_slot_mapping=longs[end:],
        rows=ChunkRows(
            slots=by_row[0],
            token_starts=upload(token_starts.astype(np.int32), device),
            starts=by_row[2],
            tile_rows=tile_rows,
            tile_starts=tile_starts,
            host_starts=starts,
            host_token_starts=token_starts,
        ),
        sampling_slots=upload(chunks.sampling_slots.astype(np.int32), device),
        last_tokens=upload(ends[chunks.sampling_rows] - 1, device),
    )
