"""``pack`` and ``unpack``: one launch for all pieces of all rows."""

import triton
import triton.language as tl
from torch import Tensor

from kernels.pieces.layout import Pieces

BLOCK = 1024  # words


def launch(pieces: Pieces, rows: Tensor, packed: Tensor, *, packs: bool) -> None:
    num_chunks = triton.cdiv(int(pieces.table[:, 2].max()), BLOCK)
    copy_pieces_kernel[num_chunks, len(pieces.table), len(rows)](
        pieces.memory, packed, rows, pieces.device_table, packed.shape[1], PACKS=packs,
        BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip


@triton.jit
def copy_pieces_kernel(
    p_memory,  # [all words]
    p_packed,  # [N, num_words]
    p_rows,  # [N] int64
    p_table,  # [P, 4] int64
    num_words,
    PACKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i_chunk, i_piece, i_row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first = tl.load(p_table + 4 * i_piece)
    stride = tl.load(p_table + 4 * i_piece + 1)
    size = tl.load(p_table + 4 * i_piece + 2)
    at = tl.load(p_table + 4 * i_piece + 3)
    row = tl.load(p_rows + i_row)
    o_words = i_chunk.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_in = o_words < size
    p_there = p_memory + first + row * stride + o_words
    p_here = p_packed + i_row.to(tl.int64) * num_words + at + o_words
    if PACKS:
        tl.store(p_here, tl.load(p_there, mask=is_in, other=0), mask=is_in)
    else:
        tl.store(p_there, tl.load(p_here, mask=is_in, other=0), mask=is_in)
