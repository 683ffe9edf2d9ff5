"""An adapter's matrices, packed for the native library's GEMMs.

Packing is rearrangement by numpy, on the calling thread alone: a step that runs meanwhile keeps its
threads. The structures are those of ``adapt.h``, field by field.
"""

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kernels.adapt import Change
from kernels.cpu.memory import huge_zeros
from kernels.cpu.operators import LANES, PACKED_DEPTH, MatrixStruct, PackedMatrix
from kernels.cpu.pointers import Int, Pointer

WORD = 4  # bytes: the elements of a column that a GEMM takes at a time
BITS = {2: torch.int16, 4: torch.int32}  # by itemsize


class _PieceStruct(ctypes.Structure):
    _fields_ = [("a", MatrixStruct), ("b", MatrixStruct), ("first", Int)]


class _PiecesStruct(ctypes.Structure):
    _fields_ = [("each", Pointer), ("num", Int)]


class PackedAdapter:
    """``changes`` of each site, all of one of ``DTYPES``; ranks are zero-padded to whole tiles. A
    table's A are rows, one for each id. ``pieces`` is an array of structures."""

    def __init__(self, changes: Sequence[Sequence[Change]]) -> None:
        every = [change for of_site in changes for change in of_site]
        sizes = [
            _tile_bytes(*shape, change.a.itemsize)
            for change in every
            for shape in _shapes_of(change)
        ]
        self.memory = huge_zeros(sum(sizes))
        parts = iter(self.memory[: sum(sizes)].split(sizes) if sizes else ())
        self.matrices = [[_pack(each, next(parts), next(parts)) for each in of] for of in changes]
        self._structs = [_piece_structs(*pair) for pair in zip(changes, self.matrices, strict=True)]
        each = (_PiecesStruct(ctypes.addressof(own), len(own)) for own in self._structs)
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
    rank = _filled_up(rank, LANES) if inputs and outputs else 0
    return _tile_bytes(rank, inputs, itemsize) + _tile_bytes(outputs, rank, itemsize)


def _shapes_of(change: Change) -> list[tuple[int, int]]:
    """Outputs and inputs of the packed A and B."""
    rank = _filled_up(len(change.a), LANES)
    return [(rank, change.a.shape[1]), (len(change.b), rank)]


def _pack(change: Change, a: Tensor, b: Tensor) -> tuple[PackedMatrix, PackedMatrix]:
    """``a`` and ``b`` are the memory of the tiles."""
    of_a, of_b = _shapes_of(change)
    packed_a = _rows(change.a, *of_a, a) if change.is_table else _packed(change.a, *of_a, a)
    return packed_a, _packed(change.b, *of_b, b)


def _rows(weight: Tensor, n: int, k: int, memory: Tensor) -> PackedMatrix:
    """weight [≤ n, k] → its columns, one after the other [k, n]. ``memory`` [bytes] is zeroed."""
    bits = bits_of(weight)
    rows = memory.numpy()[: n * k * weight.itemsize].view(bits.dtype).reshape(k, n)
    rows[:, : len(bits)] = bits.T
    return PackedMatrix(memory.view(weight.dtype), None, n, k)


def _packed(weight: Tensor, n: int, k: int, memory: Tensor) -> PackedMatrix:
    """weight [≤ n, ≤ k] → the tiles of a weight [n, k], as ``NativeLibrary.pack`` makes them.
    ``memory`` [bytes] is zeroed."""
    bits = bits_of(weight)
    rows = np.zeros((len(bits), k), bits.dtype)
    rows[:, : bits.shape[1]] = bits
    words = rows.view(np.int32)  # [rows, k · itemsize / WORD]
    num_whole, width = len(words) // LANES, words.shape[1]
    depth = _filled_up(k, PACKED_DEPTH) * weight.itemsize // WORD
    tiles = memory.numpy()[: _filled_up(n, LANES) * depth * WORD].view(np.int32)
    tiles = tiles.reshape(-1, depth, LANES)
    whole, rest = words[: num_whole * LANES], words[num_whole * LANES :]
    tiles[:num_whole, :width] = whole.reshape(num_whole, LANES, width).swapaxes(1, 2)
    if len(rest):
        tiles[num_whole, :width, : len(rest)] = rest.T
    return PackedMatrix(memory.view(weight.dtype), None, n, k)


def _piece_structs(
    changes: Sequence[Change], matrices: Sequence[tuple[PackedMatrix, PackedMatrix]]
) -> "ctypes.Array[_PieceStruct]":
    pairs = zip(changes, matrices, strict=True)
    structs = (_PieceStruct(a.struct(), b.struct(), change.first) for change, (a, b) in pairs)
    return (_PieceStruct * len(changes))(*structs)


def _tile_bytes(n: int, k: int, itemsize: int) -> int:
    return _filled_up(n, LANES) * _filled_up(k, PACKED_DEPTH) * itemsize


def _filled_up(num: int, unit: int) -> int:
    return -(-num // unit) * unit
