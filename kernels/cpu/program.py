"""A forward pass as a list of operators that the native library runs in one call.

The structures are those of ``program.cpp``, field by field. What they point to is kept alive by the
objects that hold them.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from kernels.cpu.memory import Arena
from kernels.paged_attention import AttentionBatch

LANES = 16  # columns of a tile; head sizes, hidden sizes and block sizes are its multiples
MAX_HEAD_DIM = 256
MAX_GROUP_SIZE = 48  # query heads that share a KV head
DTYPES = (torch.bfloat16, torch.float32)

_Pointer = ctypes.c_void_p
_Int = ctypes.c_int32
_Float = ctypes.c_float


class Kind(IntEnum):
    """What an operator reads and writes: a wide buffer is float32, a narrow one of the library's
    type."""

    EMBED = 0  # ids → wide
    SCALE = 1  # wide, in place
    NORM = 2  # wide → wide or narrow
    NARROW = 3  # wide → narrow
    LINEAR = 4  # narrow → wide
    GATED = 5  # narrow → narrow
    ATTEND = 6  # wide, which it changes → narrow


class _Matrix(ctypes.Structure):
    _fields_ = [("tiles", _Pointer), ("bias", _Pointer), ("n", _Int), ("k", _Int)]


class _Heads(ctypes.Structure):
    _fields_ = [
        *((name, _Int) for name in ("num_heads", "num_kv_heads", "head_dim")),
        *((name, _Int) for name in ("is_interleaved", "norms_tokens", "window")),
        *((name, _Float) for name in ("eps", "scale")),
        *((name, _Pointer) for name in ("query_norm", "key_norm", "cos", "sin")),
    ]


class _Operator(ctypes.Structure):
    _fields_ = [
        *((name, _Int) for name in ("kind", "in", "out", "query", "layer", "size")),
        *((name, _Int) for name in ("is_wide", "adds")),
        *((name, _Float) for name in ("scale", "eps")),
        ("norm", _Pointer),
        ("weight", _Matrix),
        *((name, _Pointer) for name in ("rows", "heads")),
    ]


class _Rows(ctypes.Structure):
    _fields_ = [
        ("num_rows", _Int),
        *((name, _Pointer) for name in ("starts", "num_keys", "tables")),
        ("table_stride", _Int),
        ("first_keys", _Pointer),
    ]


class _Step(ctypes.Structure):
    _fields_ = [
        *((name, _Int) for name in ("num_tokens", "block_size")),
        *((name, _Pointer) for name in ("positions", "slot_mapping")),
        ("rows", _Rows),
        *((name, _Pointer) for name in ("caches", "buffers")),
    ]


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """A weight [n, k] as tiles of sixteen outputs, see ``product.h``."""

    tiles: Tensor  # flat
    bias: Tensor | None  # [n] float32
    struct: _Matrix

    @property
    def tensors(self) -> list[Tensor]:
        return [self.tiles] if self.bias is None else [self.tiles, self.bias]


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedHeads:
    """``cos`` and ``sin`` [positions, head_dim] float32, as the rotation's table has them. The
    norms are float32 [head_dim], or of all heads of a token together if ``norms_tokens``."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    cos: Tensor
    sin: Tensor
    is_interleaved: bool
    window: int | None
    query_norm: Tensor | None
    key_norm: Tensor | None
    norms_tokens: bool
    eps: float

    @property
    def tensors(self) -> list[Tensor]:
        found = (self.cos, self.sin, self.query_norm, self.key_norm)
        return [tensor for tensor in found if tensor is not None]

    def struct(self) -> _Heads:
        return _Heads(
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            is_interleaved=self.is_interleaved,
            norms_tokens=self.norms_tokens,
            window=self.window or 0,
            eps=self.eps,
            scale=self.scale,
            query_norm=address(self.query_norm),
            key_norm=address(self.key_norm),
            cos=address(self.cos),
            sin=address(self.sin),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """``source``, ``out`` and ``query`` are buffers of the program; ``size`` is that of a row of
    ``source``, or of ``out`` where that is an embedding.

    ``adds``: to what ``out`` holds. ``rows``: embeddings [vocab, size], where ``weight`` is not
    what they are the columns of.
    """

    kind: Kind
    source: int
    out: int
    size: int
    query: int = 0
    layer: int = 0
    is_wide: bool = False
    adds: bool = False
    scale: float = 1.0
    eps: float = 0.0
    norm: Tensor | None = None
    weight: PackedMatrix | None = None
    rows: Tensor | None = None
    heads: PackedHeads | None = None

    @property
    def tensors(self) -> list[Tensor]:
        own = [tensor for tensor in (self.norm, self.rows) if tensor is not None]
        packed = [each.tensors for each in (self.weight, self.heads) if each is not None]
        return sum(packed, own)

    def struct(self, heads: _Heads | None) -> _Operator:
        matrix = _Matrix() if self.weight is None else self.weight.struct
        return _Operator(
            *(self.kind, self.source, self.out, self.query, self.layer, self.size),
            *(self.is_wide, self.adds, self.scale, self.eps, address(self.norm), matrix),
            *(address(self.rows), None if heads is None else ctypes.addressof(heads)),
        )


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
        self._pack = library[f"shoal_pack_{name}"]
        self.run = library[f"shoal_run_{name}"]
        library["shoal_start"](num_threads)

    def pack(
        self, weight: Tensor, bias: Tensor | None = None, order: np.ndarray | None = None
    ) -> PackedMatrix:
        """weight [n, k], bias [n]; ``order`` [n] int64: which row becomes which output."""
        n, k = weight.shape
        weight = weight.to(self.dtype).contiguous()
        order = np.arange(n) if order is None else order
        tiles = self._arena.empty(-(-n // LANES) * LANES * k, self.dtype)
        self._pack(address(weight), array_address(order), n, k, address(tiles))
        if bias is not None:
            bias = bias.float()[torch.from_numpy(order)].contiguous()
        return PackedMatrix(tiles, bias, _Matrix(address(tiles), address(bias), n, k))


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
        self._structs = (_Operator * len(operators))(*(each.struct(heads) for each, heads in pairs))
        self._places = (_Pointer * len(buffers))()
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
    ) -> Tensor:
        """inputs [T, …] each: float32, or int32 where they are ids; positions, slot_mapping [T]
        int64, which a program that attends needs with the rest. Returns [T, size] float32.

        Only the size of the caches matters here: ``heads.h`` documents how they are laid out.
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
        caches = (_Pointer * len(kv_caches))(*(cache.data_ptr() for cache in kv_caches))
        step = _Step(
            num_tokens=num_tokens,
            block_size=0 if attention is None else attention.block_size,
            positions=address(positions),
            slot_mapping=address(slot_mapping),
            rows=_Rows() if attention is None else _rows(attention),
            caches=ctypes.cast(caches, _Pointer),
            buffers=ctypes.cast(self._places, _Pointer),
        )
        self._library.run(self._structs, len(self._structs), ctypes.byref(step))
        return out

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


def address(tensor: Tensor | None) -> Any:
    return None if tensor is None else _Pointer(tensor.data_ptr())


def array_address(array: np.ndarray) -> Any:
    if array.dtype != np.int64 or not array.flags.c_contiguous:
        raise ValueError(f"{array.dtype} array where contiguous int64 is wanted")
    return _Pointer(array.ctypes.data)
