"""The rows of a step and their blocks, held on the device: the host does not know the lengths of
decode rows, so a captured graph can be replayed."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

# Tokens of a prefill chunk per tile. With 128 rows each key is read from L2 half as often as with
# 64, which would exceed L2's bandwidth; unmeasured.
TILE = 128


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """B rows of ``width`` tokens each. Token j of a row sees its keys ``first_key … start + j``.

    A padding row has start 0 and a table of null blocks: it reads one key of the null block.
    """

    width: int
    slots: Tensor  # [B] int32: rows of the block tables
    starts: Tensor  # [B] int32: the position of a row's first token
    arrivals: Tensor  # [at least B * H_kv] int32 zeros: kernels count in it and reset it to zeros
    first_keys: Tensor | None = None  # [B] int32: earlier keys are hidden; None: no key is hidden

    @property
    def num_tokens(self) -> int:
        return len(self.slots) * self.width


@dataclass(frozen=True, slots=True)
class ChunkRows:
    """R prefill chunks, whose tokens follow those of the decode rows.

    Each token sees the keys of its row from ``first_key`` to its own, or those before its end, if
    that is later.
    """

    slots: Tensor  # [R] int32: rows of the block tables
    token_starts: Tensor  # [R + 1] int32, counted from the step's first token
    starts: Tensor  # [R] int32: the position of a chunk's first token
    tile_rows: Tensor  # [num_tiles] int32: the row of each tile of TILE tokens
    tile_starts: Tensor  # [num_tiles] int32: the tile's first token, counted from its row's first
    host_starts: np.ndarray  # [R] int64: ``starts`` on the host, for torch's implementation
    host_token_starts: np.ndarray  # [R + 1] int64: ``token_starts``
    first_keys: Tensor | None = None  # [R] int32: earlier keys are hidden; None: no key is hidden
    # [T] int32 of all tokens of the step, not descending in a row; None: no token sees a key behind
    # its own.
    ends: Tensor | None = None


@dataclass(frozen=True, slots=True)
class DeviceAttention:
    """The tokens of a step: decode rows first, then chunks. Groups of layers have different
    ``tables``."""

    tables: Tensor  # [N, max_blocks] int32, contiguous
    decode: DecodeRows | None
    chunks: ChunkRows | None
    block_size: int
    max_keys: int  # upper bound for decode rows; used by torch's implementation only


def make_tiles(host_nums: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Tokens of each chunk [R] → ``tile_rows`` and ``tile_starts``, each [num_tiles] int32."""
    counts = -(-host_nums // TILE)
    rows = np.repeat(np.arange(len(host_nums)), counts)
    firsts = np.repeat(np.cumsum(counts) - counts, counts)
    starts = (np.arange(len(rows)) - firsts) * TILE
    return rows.astype(np.int32), starts.astype(np.int32)


class FlatRows(NamedTuple):
    """All R rows of a step of T tokens: decode rows, then chunks."""

    slots: Tensor  # [R] int32
    starts: Tensor  # [R] int32: the position of a row's first token
    token_starts: Tensor  # [R] int32: its place among the T tokens
    token_rows: Tensor  # [T] int32: the row of each token


def flat_rows(decode: DecodeRows | None, chunks: ChunkRows | None, num_tokens: int) -> FlatRows:
    """There are rows. Chunks follow the decode rows that a graph uses, in place of the tokens of
    unused ones. Padding behind the last chunk counts as tokens of the last row."""
    parts: list[tuple[Tensor, Tensor, Tensor]] = []
    if decode is not None:
        tokens = _numbers(num_tokens, decode.slots)
        token_rows = tokens // decode.width
        token_starts = decode.width * _numbers(len(decode.slots), decode.slots)
        parts.append((decode.slots, decode.starts, token_starts))
    if chunks is not None:
        tokens = _numbers(num_tokens, chunks.slots)
        row = torch.searchsorted(chunks.token_starts, tokens, right=True, out_int32=True) - 1
        row = row.clamp(0, len(chunks.slots) - 1)
        if decode is not None:
            row = torch.where(tokens < chunks.token_starts[0], token_rows, len(decode.slots) + row)
        token_rows = row
        parts.append((chunks.slots, chunks.starts, chunks.token_starts[:-1]))
    slots, starts, token_starts = map(torch.cat, zip(*parts, strict=True))
    return FlatRows(slots, starts, token_starts, token_rows)


def _numbers(num: int, like: Tensor) -> Tensor:
    """0 … num − 1, int32"""
    return torch.arange(num, dtype=torch.int32, device=like.device)


def seen_keys(
    positions: Tensor,
    num_keys: int,
    first_keys: Tensor | None,
    window: int | None = None,
    ends: Tensor | None = None,
) -> Tensor:
    """positions and ends [R, tokens], first_keys [R] → bool [R, tokens, num_keys]: the keys each
    token sees."""
    keys = torch.arange(num_keys, device=positions.device)
    is_seen = keys <= positions.unsqueeze(-1)
    if ends is not None:
        is_seen |= keys < ends.unsqueeze(-1)
    if window is not None:
        is_seen &= keys > positions.unsqueeze(-1) - window
    if first_keys is not None:
        is_seen &= keys >= first_keys.view(-1, 1, 1)
    return is_seen
