"""Forward passes of steps with prompt chunks, as CUDA graphs: one launch instead of one for every
operator of every layer.

A graph has a fixed number of tokens and takes any mix of decode rows, chunks and padding, in this
order. The boundaries are in tensors, filled before each replay. Grids are sized for the largest
mix of rows, and programs without work return at once.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from kernels.decode_inputs.inputs import DecodeInputs
from kernels.linear import FEW_TOKENS
from kernels.paged_attention import TILE, ChunkRows, make_tiles
from kernels.sizes import ALIGNED, cdiv, empty_rows
from services.worker.engine.device.chunks import Chunks
from services.worker.engine.device.recorders import CaptureError, on_all_ranks
from services.worker.engine.device.segments import Segments
from services.worker.engine.device.steps import Record, Run
from services.worker.layers.context import forward_context
from services.worker.machine.streams import upload
from shared.errors import ConfigError


class TrunkShape(NamedTuple):
    num_tokens: int
    width: int  # tokens per decode row

    def __str__(self) -> str:
        return f"steps with prompts of up to {self.num_tokens} tokens"

    def takes(self, num_rows: int, width: int, num_chunk_tokens: int) -> bool:
        """True if the step fits. Small steps must not be padded past ``FEW_TOKENS``: cuBLAS rounds
        differently, and outputs would depend on the recorded shapes."""
        num_tokens = num_rows * self.width + num_chunk_tokens
        has_room = num_tokens <= self.num_tokens and width <= self.width
        is_few = num_rows * width + num_chunk_tokens <= FEW_TOKENS
        return has_room and (self.num_tokens <= FEW_TOKENS or not is_few)


def trunk_shapes(sizes: Sequence[int], max_tokens: int, max_drafts: int) -> list[TrunkShape]:
    """Returns the shapes to record, the largest first. Each has room for a decode row and a prompt
    token."""
    found = {
        TrunkShape(num_tokens, 1 + depth)
        for num_tokens in {min(size, max_tokens) for size in sizes}
        for depth in {0, max_drafts}
    }
    return sorted((shape for shape in found if shape.num_tokens > shape.width), reverse=True)


class TrunkGraphs:
    """Recorded forward passes of several shapes."""

    def __init__(
        self, segments: Segments, wanted: Sequence[TrunkShape], max_rows: int, max_keys: int
    ) -> None:
        """``wanted``: the shapes that may be recorded. A step has at most ``max_rows`` rows with at
        most ``max_keys`` keys each."""
        self._segments = segments
        self._max_rows, self._max_keys = max_rows, max_keys
        max_tokens = max((shape.num_tokens for shape in wanted), default=0)
        size = max_tokens, segments.model.state_size
        dtype, device = segments.kv_cache.dtype, segments.kv_cache.device
        self._hidden = torch.empty(size, dtype=dtype, device=device)  # steps run one at a time
        self._trunks: dict[TrunkShape, RecordedTrunk] = {}

    def __len__(self) -> int:
        return len(self._trunks)

    def record(self, shape: TrunkShape, record: Record) -> None:
        """Raises torch.OutOfMemoryError, and ConfigError if it cannot be recorded."""
        hidden = self._hidden[: shape.num_tokens]
        with on_all_ranks(self._segments.parallel):
            trunk = RecordedTrunk(self._segments, shape, self._max_rows, self._max_keys, hidden)
        try:
            trunk.record(record)
        except CaptureError as error:
            raise ConfigError(
                f"cudagraph-mode: {shape} cannot be captured as CUDA graphs: {error};"
                " full_decode_only leaves them out"
            ) from error
        self._trunks[shape] = trunk

    def find(self, num_rows: int, width: int, num_chunk_tokens: int) -> "RecordedTrunk | None":
        """The smallest trunk with room for these decode rows of ``width`` tokens and chunks."""
        fitting = (
            shape for shape in self._trunks if shape.takes(num_rows, width, num_chunk_tokens)
        )
        shape = min(fitting, default=None)
        return None if shape is None else self._trunks[shape]


class RecordedTrunk:
    """A forward pass over ``shape.num_tokens`` tokens.

    The decode rows come first. Unused decode rows have no keys: attention skips them, and the chunk
    rows overwrite their output. The chunks follow, then a chunk of the null slot with all remaining
    tokens, then empty chunks.
    """

    def __init__(
        self, segments: Segments, shape: TrunkShape, max_rows: int, max_keys: int, hidden: Tensor
    ) -> None:
        """The hidden states are written to ``hidden`` [num_tokens, hidden]."""
        self.width = shape.width
        self._segments = segments
        self._max_keys = max_keys
        self._hidden = hidden
        num_tokens, num_rows = shape.num_tokens, min(max_rows, shape.num_tokens // shape.width)
        num_chunks = min(max_rows, num_tokens) + 2
        num_tiles = (num_tokens + (TILE - 1) * min(num_chunks, num_tokens)) // TILE
        self._pads = _Pads.make(segments, num_tokens, shape.width, max(num_rows, num_chunks))
        self._input_ids = self._pads.ids.clone()
        self._positions = self._pads.positions.clone()
        num_groups = len(segments.state.block_tables)
        self._slot_mapping = empty_rows(num_groups, num_tokens, hidden).copy_(self._pads.places)
        self._slots = self._pads.slots[:num_rows].clone()
        self._starts = self._pads.no_keys[:num_rows].clone()
        self._num_valid = self._pads.starts[:num_rows].clone()
        self._tiles = self._pads.ids.new_zeros(2, cdiv(num_tiles, ALIGNED) * ALIGNED)
        token_starts = np.array([0] + num_chunks * [num_tokens])
        tile_rows, tile_starts = self._tiles
        self._chunks = ChunkRows(
            slots=self._pads.slots[:num_chunks].clone(),
            token_starts=upload(token_starts.astype(np.int32), hidden.device),
            starts=self._pads.starts[:num_chunks].clone(),
            tile_rows=tile_rows,
            tile_starts=tile_starts,
            host_starts=np.zeros(num_chunks, np.int64),
            host_token_starts=token_starts,
        )
        self._fill_tiles()
        self._replay: Run

    def record(self, record: Record) -> None:
        """Records a pass over padding only."""
        self._replay = record(self._compute)

    def run(self, slots: Tensor, inputs: DecodeInputs, chunks: Chunks) -> Tensor:
        """Returns the hidden states of the decode rows ``slots`` [B] int32 and of ``chunks``:
        [B * w + T, hidden], overwritten by the next step."""
        self._fill_tokens(inputs, chunks)
        self._fill_rows(slots, inputs, chunks)
        self._replay()
        return self._hidden[: len(inputs.input_ids) + len(chunks.input_ids)]

    def _compute(self) -> None:
        segments = self._segments
        rows = segments.decode_rows(self._slots, self._starts, self.width)
        of_rows = rows, self._num_valid, self._max_keys, self._chunks
        with forward_context(segments.trunk_context(self._slot_mapping, *of_rows)):
            self._hidden.copy_(segments.model(self._input_ids, self._positions))

    def _fill_tokens(self, inputs: DecodeInputs, chunks: Chunks) -> None:
        pads = self._pads
        _fill(self._input_ids, inputs.input_ids, chunks.input_ids, pads.ids)
        _fill(self._positions, inputs.positions, chunks.positions, pads.positions)
        _fill(self._slot_mapping, inputs.slot_mapping, chunks.slot_mapping, pads.places)

    def _fill_rows(self, slots: Tensor, inputs: DecodeInputs, chunks: Chunks) -> None:
        pads, ours, theirs = self._pads, self._chunks, chunks.rows
        _fill(self._slots, slots, pads.slots)
        _fill(self._starts, inputs.starts, pads.no_keys)
        _fill(self._num_valid, inputs.num_valid, pads.starts)
        _fill(ours.slots, theirs.slots, pads.slots)
        _fill(ours.starts, theirs.starts, pads.starts)
        _fill(ours.token_starts, theirs.token_starts, pads.ends)
        num = len(theirs.host_starts)
        ours.host_starts[:num], ours.host_starts[num:] = theirs.host_starts, 0
        ours.host_token_starts[: num + 1] = theirs.host_token_starts
        ours.host_token_starts[num + 1 :] = len(self._input_ids)
        self._fill_tiles()

    def _fill_tiles(self) -> None:
        """Unused tiles belong to the last chunk, which is empty."""
        tiles = np.zeros(self._tiles.shape, np.int32)
        tiles[0] = len(self._chunks.host_starts) - 1
        found = make_tiles(np.diff(self._chunks.host_token_starts))
        tiles[:, : len(found[0])] = found
        self._tiles.copy_(upload(tiles, self._tiles.device))


class _Pads(NamedTuple):
    """The padding of the input tensors."""

    ids: Tensor  # [N] int32
    positions: Tensor  # [N] int64
    places: Tensor  # [G, N] int64: an entry of the null block
    slots: Tensor  # [R] int32: the null slot
    starts: Tensor  # [R] int32, 0
    no_keys: Tensor  # [R] int32: starts of rows that end before their first key
    ends: Tensor  # [R] int32: the number of tokens

    @classmethod
    def make(cls, segments: Segments, num_tokens: int, width: int, num_rows: int) -> "_Pads":
        ids, rows = (segments.eos_ids.new_zeros(num) for num in (num_tokens, num_rows))
        place = segments.null_block * segments.kv_cache.block_size
        null_slot = len(segments.state.is_open) - 1
        num_groups = len(segments.state.block_tables)
        return cls(
            ids=ids,
            positions=ids.long(),
            places=torch.full_like(ids, place, dtype=torch.int64).expand(num_groups, -1),
            slots=torch.full_like(rows, null_slot),
            starts=rows,
            no_keys=torch.full_like(rows, -width),
            ends=torch.full_like(rows, num_tokens),
        )


def _fill(target: Tensor, *parts: Tensor) -> None:
    """Concatenates the rows of ``parts`` into ``target``; the last part is cut to the remaining
    room."""
    *given, pad = parts
    room = target.shape[-1] - sum(part.shape[-1] for part in given)
    torch.cat((*given, pad[..., :room]), -1, out=target)
