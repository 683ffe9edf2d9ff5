"""Adapters in use on a device, and the rows of a step that have them."""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from kernels.adapt import Change
from kernels.paged_attention import ChunkRows, DecodeRows
from kernels.sizes import cdiv, next_power_of_2

BLOCK_OUTPUTS = 64  # of a program; not measured
SPLIT_INPUTS = 512  # of a program; not measured
MIN_RANK = 16  # of tensor cores


class Bank(NamedTuple):
    """The changes of a product's P parts by L adapters, with zeros for missing ranks and parts. All
    numbers of a rank of an adapter are together, so both tensors have the same strides of these."""

    a: Tensor  # [L, R, P, K]
    b: Tensor  # [L, R, N]
    blocks: Tensor  # [blocks, 3] int32: part, first output, and the end of the part's outputs

    @property
    def num_splits(self) -> int:
        return cdiv(self.a.shape[3], SPLIT_INPUTS)


class AdapterRows(NamedTuple):
    """The rows of a step, and the adapters ``of_slots`` [num_slots + 1] int32: indices, or −1."""

    of_slots: Tensor
    decode: DecodeRows | None
    chunks: ChunkRows | None


def padded_rank(rank: int) -> int:
    return max(MIN_RANK, next_power_of_2(rank))


def make_blocks(sizes: Sequence[int]) -> list[tuple[int, int, int]]:
    """The ``Bank.blocks`` of parts with ``sizes`` outputs."""
    blocks, start = [], 0
    for part, size in enumerate(sizes):
        end = start + size
        blocks += [(part, first, end) for first in range(start, end, BLOCK_OUTPUTS)]
        start = end
    return blocks


def fill(a: Tensor, b: Tensor, changes: Sequence[Change], firsts: Sequence[int]) -> None:
    """Writes ``changes`` of parts, which begin at the outputs ``firsts``, to a [R, P, K] and
    b [R, N], which hold zeros."""
    for first, own_a, own_b, _ in changes:
        a[: len(own_a), firsts.index(first)] = own_a
        b[: len(own_a), first : first + len(own_b)] = own_b.T
