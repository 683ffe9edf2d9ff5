"""The operators of adapters in native code, and what they read: the adapters and tokens of a step.

The structures are those of ``adapt.h``, field by field.
"""

import ctypes
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from kernels.adapt.layout import Layout
from kernels.cpu.pointers import Int, Pointer


class _RowsStruct(ctypes.Structure):
    _fields_ = [
        *((name, Pointer) for name in ("adapters", "segments", "tokens", "is_adapted")),
        ("num_segments", Int),
    ]


class AdaptStruct(ctypes.Structure):
    _fields_ = [("rows", Pointer), *((name, Int) for name in ("site", "size"))]


class Bound(Protocol):
    """An adapter, as ``PackedAdapter`` packs it."""

    pieces: Any  # of each site, an array of structures


class AdaptedRows:
    """Adapters by index, and the tokens of the next pass. Programs read both as they run, so only
    their thread may change them."""

    def __init__(self, max_adapters: int) -> None:
        self._adapters = (Pointer * max_adapters)()
        self._bound: list[Bound | None] = [None] * max_adapters
        self._arrays: list[np.ndarray] = []
        self._struct = _RowsStruct(adapters=ctypes.addressof(self._adapters))

    @property
    def address(self) -> int:
        return ctypes.addressof(self._struct)

    def bind(self, index: int, adapter: Bound | None) -> None:
        self._adapters[index] = None if adapter is None else ctypes.addressof(adapter.pieces)
        self._bound[index] = adapter  # alive as long as it may be read

    def lay_out(self, layout: Layout | None) -> None:
        """None: no token has an adapter."""
        if layout is None:
            self._struct.num_segments = 0
            return
        numbers = layout.tokens.astype(np.int32)
        is_adapted = np.zeros(layout.num_tokens, np.uint8)
        is_adapted[layout.tokens] = 1
        starts, nums = layout.starts[:-1], np.diff(layout.starts)
        first, last = layout.tokens[starts], layout.tokens[starts + nums - 1]
        first = np.where(last - first == nums - 1, first, -1)
        segments = np.stack([starts, nums, layout.adapters, first], 1).astype(np.int32)
        self._arrays = [segments, numbers, is_adapted]
        struct = self._struct
        struct.segments, struct.tokens, struct.is_adapted = (
            array.ctypes.data for array in self._arrays
        )
        struct.num_segments = len(segments)


@dataclass(frozen=True, slots=True)
class PackedAdapt:
    """The product number ``site``, with ``size`` outputs."""

    rows: AdaptedRows
    site: int
    size: int

    def struct(self) -> AdaptStruct:
        return AdaptStruct(self.rows.address, self.site, self.size)
