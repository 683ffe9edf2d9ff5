"""A forward pass as a list of operators that the native library runs in one call."""

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from kernels.cpu.memory import Arena
from kernels.cpu.operators import (
    LANES,
    PACKED_DEPTH,
    Cached,
    Int,
    Operator,
    OperatorStruct,
    PackedMatrix,
    Pointer,
    address,
    array_address,
)
from kernels.paged_attention import AttentionBatch

GROUP = 32  # codes of four bits that share a scale
CODES_DEPTH = 8  # of those of an output that are packed together


class _Rows(ctypes.Structure):
    _fields_ = [
        ("num_rows", Int),
        *((name, Pointer) for name in ("starts", "num_keys", "tables")),
        ("table_stride", Int),
        ("first_keys", Pointer),
    ]


class _Step(ctypes.Structure):
    _fields_ = [
        *((name, Int) for name in ("num_tokens", "block_size")),
        *((name, Pointer) for name in ("positions", "slot_mapping")),
        ("rows", _Rows),
        *((name, Pointer) for name in ("caches", "scales", "buffers")),
        ("cached", Int),
    ]


class Buffer(NamedTuple):
    """[T, size]"""

    size: int
    dtype: torch.dtype


class NativeLibrary:
    """The functions of a library for weights of one type, ``DTYPES``."""

    def __init__(self, library: ctypes.CDLL, dtype: torch.dtype, num_threads: int) -> None:
        name = str(dtype).removeprefix("torch.")
        self.dtype = dtype
        self._arena = Arena()
        self._pack = {dtype: library[f"shoal_pack_{name}"], torch.int8: library["shoal_pack_int8"]}
        self._pack_int4 = library["shoal_pack_int4"]
        self.run = library[f"shoal_run_{name}"]
        library["shoal_start"](num_threads)

    def pack(
        self,
        weight: Tensor,
        bias: Tensor | None = None,
        order: np.ndarray | None = None,
        *,
        scales: Tensor | None = None,
    ) -> PackedMatrix:
        """weight [n, k], bias [n]; ``order`` [n] int64: which row becomes which output. With
        ``scales`` [n], weight is int8: whole numbers that these are multiplied with."""
        n, k = weight.shape
        dtype = self.dtype if scales is None else torch.int8
        weight = weight.to(dtype).contiguous()
        order = np.arange(n) if order is None else order
        num_columns, depth = _filled_up(n, LANES), _filled_up(k, PACKED_DEPTH)
        tiles = self._arena.empty(num_columns * depth, dtype)
        self._pack[dtype](address(weight), array_address(order), n, k, address(tiles))
        bits = 0 if scales is None else 8
        return PackedMatrix(tiles, _in_order(bias, order), _in_order(scales, order), n, k, bits)

    def pack_int4(
        self,
        codes: Tensor,
        scales: Tensor,
        k: int,
        bias: Tensor | None = None,
        order: np.ndarray | None = None,
    ) -> PackedMatrix:
        """codes [n, groups · 16] uint8: two each, the first one in the lower half, which stand for
        whole numbers, 8 more than they are; scales [n, groups] bfloat16. ``k`` is a multiple of 8:
        the last group may have fewer than 32 codes that count."""
        n, num_groups = scales.shape
        if k % CODES_DEPTH or num_groups != -(-k // GROUP):
            raise ValueError(f"{k} inputs in {num_groups} groups of {GROUP}, or no multiple of 8")
        if codes.shape != (n, num_groups * GROUP // 2):
            raise ValueError(f"codes {list(codes.shape)} for {n} outputs with {num_groups} groups")
        order = np.arange(n) if order is None else order
        num_columns = _filled_up(n, LANES)
        tiles = self._arena.empty(num_columns * num_groups * GROUP // 2, torch.uint8)
        codes = codes.contiguous()
        self._pack_int4(address(codes), array_address(order), n, k, address(tiles))
        by_tile = torch.zeros(num_columns, num_groups, dtype=torch.bfloat16)
        by_tile[:n] = scales[torch.from_numpy(order)]
        packed_scales = self._arena.empty(by_tile.numel(), torch.bfloat16)
        packed_scales.copy_(by_tile.unflatten(0, (-1, LANES)).transpose(1, 2).flatten())
        return PackedMatrix(tiles, _in_order(bias, order), packed_scales, n, k, bits=4)


def _filled_up(num: int, unit: int) -> int:
    return -(-num // unit) * unit


def _in_order(tensor: Tensor | None, order: np.ndarray) -> Tensor | None:
    """tensor [n] in float32"""
    return None if tensor is None else tensor.float()[torch.from_numpy(order)].contiguous()


def gate_up_order(size: int) -> np.ndarray:
    """The order of the rows of gates over ups, [2 · size]: tile by tile in turns."""
    tiles = np.arange(2 * size).reshape(2, -1, LANES)
    return np.ascontiguousarray(tiles.swapaxes(0, 1)).ravel()


class NativeProgram:
    """Operators in order, over buffers of a row for each of T tokens. All programs of a process are
    to be used by one thread: they share the library's memory.

    The first buffers are its inputs, in order, and ``output`` is the one that is given back.
    """

    def __init__(
        self,
        library: NativeLibrary,
        operators: Sequence[Operator],
        buffers: Sequence[Buffer],
        num_inputs: int,
        output: int,
    ) -> None:
        self.operators = operators
        self._library = library
        self._buffers = buffers
        self._output = output
        self._heads = [each.heads.struct() if each.heads else None for each in operators]
        pairs = zip(operators, self._heads, strict=True)
        self._structs = (OperatorStruct * len(operators))(
            *(each.struct(heads) for each, heads in pairs)
        )
        self._places = (Pointer * len(buffers))()
        self._scratch = set(range(num_inputs, len(buffers))) - {output}
        self._tensors: dict[int, Tensor] = {}
        self._room = 0  # tokens that those have room for

    def run(
        self,
        inputs: Sequence[Tensor],
        positions: Tensor | None = None,
        slot_mapping: Tensor | None = None,
        attention: AttentionBatch | None = None,
        kv_caches: Sequence[Tensor] = (),
        kv_scales: Sequence[Tensor | None] = (),
    ) -> Tensor:
        """inputs [T, …] each: float32, or int32 where they are ids; positions, slot_mapping [T]
        int64, which a program that attends needs with the rest. Returns [T, size] float32.

        Only the size of the caches and scales matters here: ``cache.h`` documents how they are laid
        out. All caches have numbers of the library's type, or all have codes of one type.
        """
        num_tokens = len(inputs[0])
        places = [each for each in (positions, slot_mapping) if each is not None]
        if any(len(each) != num_tokens for each in (*inputs, *places)):
            raise ValueError("inputs, positions and slot_mapping are not of the same tokens")
        if any(each.dtype != torch.int64 or not each.is_contiguous() for each in places):
            raise ValueError("positions or slot_mapping are not int64, or not contiguous")
        out = torch.empty(num_tokens, self._buffers[self._output].size)
        for place, tensor in enumerate(inputs):
            if not tensor.is_contiguous() or tensor.dtype not in (torch.float32, torch.int32):
                raise ValueError(f"{tensor.dtype} input {place}, or not contiguous")
            self._places[place] = tensor.data_ptr()
        self._places[self._output] = out.data_ptr()
        self._make_room(num_tokens)
        caches = (Pointer * len(kv_caches))(*(cache.data_ptr() for cache in kv_caches))
        scales = (Pointer * len(kv_caches))(*map(address, kv_scales))
        step = _Step(
            num_tokens=num_tokens,
            block_size=0 if attention is None else attention.block_size,
            positions=address(positions),
            slot_mapping=address(slot_mapping),
            rows=_Rows() if attention is None else _rows(attention),
            caches=ctypes.cast(caches, Pointer),
            scales=ctypes.cast(scales, Pointer),
            buffers=ctypes.cast(self._places, Pointer),
            cached=self._cached(kv_caches, kv_scales),
        )
        self._library.run(self._structs, len(self._structs), ctypes.byref(step))
        return out

    def _cached(self, caches: Sequence[Tensor], scales: Sequence[Tensor | None]) -> Cached:
        """What the caches hold. Raises ValueError where they are not alike, or lack scales."""
        known = {self._library.dtype: Cached.NUMBERS, torch.int8: Cached.INT8, torch.uint8: Cached.E4M3}
        found = {(cache.dtype, scale is not None) for cache, scale in zip(caches, scales, strict=True)}
        if not found:
            return Cached.NUMBERS
        (dtype, has_scales), *others = found
        if others or dtype not in known or has_scales != (known[dtype] != Cached.NUMBERS):
            raise ValueError(f"caches of types {found}, where True is one with scales")
        return known[dtype]

    def _make_room(self, num_tokens: int) -> None:
        if num_tokens <= self._room:
            return
        self._room = num_tokens
        for place in self._scratch:
            size, dtype = self._buffers[place]
            self._tensors[place] = torch.empty(num_tokens * size, dtype=dtype)
            self._places[place] = self._tensors[place].data_ptr()


def _rows(attention: AttentionBatch) -> _Rows:
    tables, first_keys = attention.block_tables, attention.first_keys
    return _Rows(
        len(attention.num_keys),
        array_address(attention.token_starts),
        array_address(attention.num_keys),
        array_address(tables),
        tables.shape[1],
        None if first_keys is None else array_address(first_keys),
    )
