"""An adapter's matrices, packed for the native library's GEMMs.

Packing is rearrangement by numpy, on the calling thread alone: a step that runs meanwhile keeps its
threads. The structures are those of ``adapt.h``, field by field.
"""

import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from kernels.adapt import Change
from kernels.cpu.memory import huge_zeros
from kernels.cpu.operators import LANES, MatrixStruct, PackedMatrix, packed_depth, whole_tiles
from kernels.cpu.pointers import Int, Pointer

WORD = 4  # bytes: the elements of a column that a GEMM takes at a time
BITS = {2: torch.int16, 4: torch.int32}  # by itemsize


class _PieceStruct(ctypes.Structure):
    _fields_ = [("b", MatrixStruct), ("first", Int)]


class _PiecesStruct(ctypes.Structure):
    _fields_ = [("a", MatrixStruct), ("each", Pointer), ("num", Int)]


class PackedSite(NamedTuple):
    """``a`` [ranks of all changes, inputs], and the B of each; None without changes."""

    a: PackedMatrix | None
    each: list[PackedMatrix]


class PackedAdapter:
    """``changes`` of each site, all of one of ``DTYPES``; ranks are zero-padded to whole tiles. A
    table's A are rows, one for each id. ``pieces`` is an array of structures."""

    def __init__(self, changes: Sequence[Sequence[Change]]) -> None:
        sizes = [sum(_tile_bytes(*shape) for shape in _shapes_of(of)) for of in changes]
        self.memory = huge_zeros(sum(sizes))
        parts = self.memory[: sum(sizes)].split(sizes)
        self.sites = [_pack(*each) for each in zip(changes, parts, strict=True)]
        pairs = zip(changes, self.sites, strict=True)
        self._structs = [_piece_structs(of, site.each) for of, site in pairs]
        each = map(_pieces_struct, self.sites, self._structs)
        self.pieces: Any = (_PiecesStruct * len(changes))(*each)

    @property
    def num_bytes(self) -> int:
        return self.memory.nbytes


def bits_of(tensor: Tensor) -> np.ndarray:
    """A view; numpy has no bfloat16."""
    bits: np.ndarray = tensor.view(BITS[tensor.itemsize]).numpy()
    return bits


def adapter_bytes(rank: int, inputs: int, outputs: int, itemsize: int) -> int:
    """The bytes of a packed change of a layer, or of nothing."""
    rank = whole_tiles(rank) if inputs and outputs else 0
    return _tile_bytes(rank, inputs, itemsize) + _tile_bytes(outputs, rank, itemsize)


def _shapes_of(changes: Sequence[Change]) -> list[tuple[int, int, int]]:
    """Outputs, inputs and bytes of a number of a site's packed matrices: each A, then each B."""
    ranks = [whole_tiles(len(each.a)) for each in changes]
    pairs = list(zip(changes, ranks, strict=True))
    of_a = [(rank, each.a.shape[1], each.a.itemsize) for each, rank in pairs]
    return of_a + [(len(each.b), rank, each.b.itemsize) for each, rank in pairs]


def _pack(changes: Sequence[Change], memory: Tensor) -> PackedSite:
    """``memory`` [bytes] is zeroed."""
    if not changes:
        return PackedSite(None, [])
    num, shapes = len(changes), _shapes_of(changes)
    sizes = [_tile_bytes(*shape) for shape in shapes]
    parts = memory.split(sizes)
    for change, (n, k, _), of_a in zip(changes, shapes, parts, strict=False):
        (_rows if change.is_table else _packed)(change.a, n, k, of_a)
    pairs = zip(changes, shapes[num:], parts[num:], strict=True)
    each = [_packed(change.b, n, k, of_b) for change, (n, k, _), of_b in pairs]
    all_a = memory[: sum(sizes[:num])].view(changes[0].a.dtype)
    a = PackedMatrix(all_a, None, sum(n for n, _, _ in shapes[:num]), shapes[0][1])
    return PackedSite(a, each)


def _rows(weight: Tensor, n: int, k: int, memory: Tensor) -> None:
    """weight [≤ n, k] → its columns, one after the other [k, n]. ``memory`` [bytes] is zeroed."""
    bits = bits_of(weight)
    rows = memory.numpy()[: n * k * weight.itemsize].view(bits.dtype).reshape(k, n)
    rows[:, : len(bits)] = bits.T


def _packed(weight: Tensor, n: int, k: int, memory: Tensor) -> PackedMatrix:
    """weight [≤ n, ≤ k] → the tiles of a weight [n, k], as ``NativeLibrary.pack`` makes them.
    ``memory`` [bytes] is zeroed."""
    bits = bits_of(weight)
    rows = np.zeros((len(bits), k), bits.dtype)
    rows[:, : bits.shape[1]] = bits
    words = rows.view(np.int32)  # [rows, k · itemsize / WORD]
    num_whole, width = len(words) // LANES, words.shape[1]
    depth = packed_depth(k, weight.itemsize) * weight.itemsize // WORD
    tiles = memory.numpy()[: whole_tiles(n) * depth * WORD].view(np.int32)
    tiles = tiles.reshape(-1, depth, LANES)
    whole, rest = words[: num_whole * LANES], words[num_whole * LANES :]
    tiles[:num_whole, :width] = whole.reshape(num_whole, LANES, width).swapaxes(1, 2)
    if len(rest):
        tiles[num_whole, :width, : len(rest)] = rest.T
    return PackedMatrix(memory.view(weight.dtype), None, n, k)


def _piece_structs(
    changes: Sequence[Change], each: Sequence[PackedMatrix]
) -> "ctypes.Array[_PieceStruct]":
    pairs = zip(changes, each, strict=True)
    structs = (_PieceStruct(b.struct(), change.first) for change, b in pairs)
    return (_PieceStruct * len(changes))(*structs)


def _pieces_struct(site: PackedSite, each: "ctypes.Array[_PieceStruct]") -> _PiecesStruct:
    if site.a is None:
        return _PiecesStruct()
    return _PiecesStruct(site.a.struct(), ctypes.addressof(each), len(each))


def _tile_bytes(n: int, k: int, itemsize: int) -> int:
    return whole_tiles(n) * packed_depth(k, itemsize) * itemsize
