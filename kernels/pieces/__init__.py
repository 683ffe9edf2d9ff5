"""Rows of a memory that lie in pieces, as KV blocks and states do, packed one after the other and
put back.

``reference.py`` does it piece by piece; torch serves CPUs, Triton CUDA devices. Torch's gather
reads 16 bytes at a time, too, but needs a launch for each piece: one or two for each layer.
"""

from torch import Tensor

from kernels.dispatch import runs_triton
from kernels.pieces.layout import Pieces


def pack(pieces: Pieces, rows: Tensor, packed: Tensor) -> None:
    """Copies ``rows`` [N] int64 to ``packed`` [N, words]."""
    if runs_triton(packed):
        from kernels.pieces.triton import launch

        launch(pieces, rows, packed, packs=True)
        return
    for view, part in _views(pieces, packed):
        part.copy_(view[rows])


def unpack(pieces: Pieces, rows: Tensor, packed: Tensor) -> None:
    """Copies ``packed`` [N, words] to ``rows`` [N] int64, which differ."""
    if runs_triton(packed):
        from kernels.pieces.triton import launch

        launch(pieces, rows, packed, packs=False)
        return
    for view, part in _views(pieces, packed):
        view[rows] = part


def _views(pieces: Pieces, packed: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Each piece of all rows, and of the packed ones."""
    found = []
    for first, stride, size, at in pieces.table.tolist():
        num_rows = (len(pieces.memory) - first - size) // stride + 1
        view = pieces.memory.as_strided((num_rows, size), (stride, 1), first)
        found.append((view, packed[:, at : at + size]))
    return found
