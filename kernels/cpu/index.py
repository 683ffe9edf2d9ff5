"""The choice of keys in native code. The structure is that of ``index.h``, field by field."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from kernels.cpu.pointers import Float, Int, Pointer, address
from kernels.index import IndexNorm, IndexSpec

MAX_INDEX_DIM, MAX_INDEX_HEADS = 256, 128


class IndexStruct(ctypes.Structure):
    _fields_ = [
        *((name, Int) for name in ("key", "weights", "turned")),
        *((name, Int) for name in ("num_heads", "dim", "rope_dim", "topk", "is_interleaved")),
        *((name, Float) for name in ("eps", "scale")),
        *((name, Pointer) for name in ("norm", "bias", "cos", "sin")),
    ]


@dataclass(frozen=True, slots=True)
class PackedIndex:
    """``buffers`` of keys, weights and rotated queries; ``table`` [2, positions, rope_dim] float32
    has the rotations."""

    buffers: Sequence[int]
    spec: IndexSpec
    norm: IndexNorm
    table: Tensor

    def struct(self) -> IndexStruct:
        spec, (cos, sin) = self.spec, self.table
        return IndexStruct(
            *self.buffers,
            *(spec.num_heads, spec.dim, spec.rope_dim, spec.topk, spec.is_interleaved),
            *(spec.eps, spec.scale),
            *(address(each) for each in (*self.norm, cos, sin)),
        )


class Index(NamedTuple):
    """The choice of keys of a layer. ``layer`` is the place of its cache in the context, and
    ``group`` that of its blocks; ``table`` as in ``PackedIndex``."""

    spec: IndexSpec
    norm: IndexNorm
    table: Tensor
    layer: int
    group: int = 0

    def packed(self, buffers: Sequence[int]) -> PackedIndex:
        wide = IndexNorm(*(each.detach().float() for each in self.norm))
        return PackedIndex(buffers, self.spec, wide, self.table)
