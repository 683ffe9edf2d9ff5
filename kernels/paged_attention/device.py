"""Which rows of a step attend to which blocks, held on the device: the host does not know the
lengths of rows that decode, so a captured graph can be replayed."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

# Tokens of a prompt's chunk that are attended to together. 128 rows a tile read each key from L2
# half as often as 64 would, which would ask more of it than it has; unmeasured.
TILE = 128


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """B rows of ``width`` tokens each. Token j of a row sees its keys ``first_key … start + j``.

    A row of the padding has start 0 and a table of null blocks: it reads one key of the null block.
    """

    width: int
    slots: Tensor  # [B] int32: rows of ``tables``
    tables: Tensor  # [N, max_blocks] int32
    starts: Tensor  # [B] int32: the position of a row's first token
    arrivals: Tensor  # [at least B * H_kv] int32, zeros: kernels count in it and leave zeros
    first_keys: Tensor | None = None  # [B] int32: keys before them are hidden; None: none is

    @property
    def num_tokens(self) -> int:
        return len(self.slots) * self.width


@dataclass(frozen=True, slots=True)
class ChunkRows:
    """R chunks of prompts, whose tokens follow those of the decode rows.

    Each token sees the keys of its row from ``first_key`` to its own.
    """

    tables: Tensor  # [N, max_blocks] int32
    slots: Tensor  # [R] int32: rows of ``tables``
    token_starts: Tensor  # [R + 1] int32, counted from the step's first token
    starts: Tensor  # [R] int32: the position of a chunk's first token
    tile_rows: Tensor  # [num_tiles] int32: the row of each tile of TILE tokens
    tile_starts: Tensor  # [num_tiles] int32: the tile's first token, counted from its row's first
    host_starts: np.ndarray  # [R] int64: ``starts``, which torch's version needs on the host
    host_token_starts: np.ndarray  # [R + 1] int64: ``token_starts``
    first_keys: Tensor | None = None  # [R] int32: keys before them are hidden; None: none is


@dataclass(frozen=True, slots=True)
class DeviceAttention:
    """The tokens of a step: those of the decode rows, then those of the chunks."""

    decode: DecodeRows | None
    chunks: ChunkRows | None
    block_size: int
    max_keys: int  # no decode row has more; only torch's version asks


def make_tiles(host_nums: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Tokens of each chunk [R] → ``tile_rows`` and ``tile_starts``, each [num_tiles] int32."""
    counts = -(-host_nums // TILE)
    rows = np.repeat(np.arange(len(host_nums)), counts)
    firsts = np.repeat(np.cumsum(counts) - counts, counts)
    starts = (np.arange(len(rows)) - firsts) * TILE
    return rows.astype(np.int32), starts.astype(np.int32)


def seen_keys(
    positions: Tensor, num_keys: int, first_keys: Tensor | None, window: int | None = None
) -> Tensor:
    """positions [R, tokens], first_keys [R] → bool [R, tokens, num_keys]: what each token sees."""
    keys = torch.arange(num_keys, device=positions.device)
    is_seen = keys <= positions.unsqueeze(-1)
    if window is not None:
        is_seen &= keys > positions.unsqueeze(-1) - window
    if first_keys is not None:
        is_seen &= keys >= first_keys.view(-1, 1, 1)
    return is_seen
