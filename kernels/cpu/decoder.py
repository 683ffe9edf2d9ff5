"""Layers of a decoder and its output head, as calls of the native library.

The structures are those of ``decoder.cpp``, field by field. What they point to is kept alive by the
objects that hold them.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

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


class _Matrix(ctypes.Structure):
    _fields_ = [("tiles", _Pointer), ("bias", _Pointer), ("n", _Int), ("k", _Int)]


class _Layer(ctypes.Structure):
    _fields_ = [
        ("input_norm", _Pointer),
        ("qkv", _Matrix),
        ("query_norm", _Pointer),
        ("key_norm", _Pointer),
        ("out", _Matrix),
        ("post_norm", _Pointer),
        ("gate_up", _Matrix),
        ("down", _Matrix),
    ]


class _Shape(ctypes.Structure):
    _fields_ = [
        *((name, _Int) for name in ("hidden", "num_heads", "num_kv_heads", "head_dim")),
        *((name, _Int) for name in ("is_interleaved", "block_size")),
        *((name, ctypes.c_float) for name in ("eps", "scale")),
        *((name, _Pointer) for name in ("cos", "sin")),
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
        ("caches", _Pointer),
        ("num_tokens", _Int),
        *((name, _Pointer) for name in ("positions", "slot_mapping")),
        ("rows", _Rows),
        *((name, _Pointer) for name in ("x", "normed", "heads", "query", "attended", "gated")),
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


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """Norms are float32; ``query_norm`` and ``key_norm`` [head_dim] may be None.

    ``gate_up`` is packed in ``gate_up_order``.
    """

    input_norm: Tensor
    qkv: PackedMatrix
    query_norm: Tensor | None
    key_norm: Tensor | None
    out: PackedMatrix
    post_norm: Tensor
    gate_up: PackedMatrix
    down: PackedMatrix

    @property
    def tensors(self) -> list[Tensor]:
        norms = (self.input_norm, self.query_norm, self.key_norm, self.post_norm)
        matrices = (self.qkv, self.out, self.gate_up, self.down)
        packed = [tensor for matrix in matrices for tensor in matrix.tensors]
        return packed + [norm for norm in norms if norm is not None]

    def struct(self) -> _Layer:
        return _Layer(
            address(self.input_norm),
            self.qkv.struct,
            address(self.query_norm),
            address(self.key_norm),
            self.out.struct,
            address(self.post_norm),
            self.gate_up.struct,
            self.down.struct,
        )


@dataclass(frozen=True, slots=True)
class DecoderShape:
    """``cos`` and ``sin`` [positions, head_dim] float32, as the rotation's table has them."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    is_interleaved: bool
    block_size: int
    eps: float
    cos: Tensor
    sin: Tensor

    def problem(self) -> str | None:
        """Why the native code cannot run it; None: it can."""
        sizes = ("hidden_size", "intermediate_size", "head_dim", "block_size")
        for name in sizes:
            if (size := getattr(self, name)) % LANES:
                return f"{name} {size} is no multiple of {LANES}"
        if self.head_dim > MAX_HEAD_DIM:
            return f"head_dim {self.head_dim} is above {MAX_HEAD_DIM}"
        if self.num_heads // self.num_kv_heads > MAX_GROUP_SIZE:
            return f"more than {MAX_GROUP_SIZE} query heads share a KV head"
        return None


class NativeLibrary:
    """The functions of a library for weights of one type, ``DTYPES``."""

    def __init__(self, library: ctypes.CDLL, dtype: torch.dtype, num_threads: int) -> None:
        name = str(dtype).removeprefix("torch.")
        self.dtype = dtype
        self._arena = Arena()
        self.pack_tiles = library[f"shoal_pack_{name}"]
        self.unpack = library[f"shoal_unpack_{name}"]
        self.layers = library[f"shoal_layers_{name}"]
        self.head = library[f"shoal_head_{name}"]
        library["shoal_start"](num_threads)

    def pack(
        self, weight: Tensor, bias: Tensor | None = None, order: np.ndarray | None = None
    ) -> PackedMatrix:
        """weight [n, k], bias [n]; ``order`` [n] int64: which row becomes which output."""
        n, k = weight.shape
        weight = weight.to(self.dtype).contiguous()
        order = np.arange(n) if order is None else order
        tiles = self._arena.empty(-(-n // LANES) * LANES * k, self.dtype)
        self.pack_tiles(address(weight), array_address(order), n, k, address(tiles))
        if bias is not None:
            bias = bias.float()[torch.from_numpy(order)].contiguous()
        return PackedMatrix(tiles, bias, _Matrix(address(tiles), address(bias), n, k))


def gate_up_order(size: int) -> np.ndarray:
    """The order of the rows of gates over ups, [2 · size]: tile by tile in turns."""
    tiles = np.arange(2 * size).reshape(2, -1, LANES)
    return np.ascontiguousarray(tiles.swapaxes(0, 1)).ravel()


class NativeDecoder:
    """Layers that share a shape and a step's scratch memory. To be used by one thread."""

    def __init__(
        self, library: NativeLibrary, shape: DecoderShape, layers: Sequence[LayerWeights]
    ) -> None:
        self._library = library
        self._keeps = shape, layers
        self._shape = _Shape(
            *(shape.hidden_size, shape.num_heads, shape.num_kv_heads, shape.head_dim),
            *(shape.is_interleaved, shape.block_size, shape.eps, shape.head_dim**-0.5),
            *(address(shape.cos), address(shape.sin)),
        )
        self._layers = (_Layer * len(layers))(*(layer.struct() for layer in layers))
        self._scratch: dict[str, Tensor] = {}

    def run(
        self,
        x: Tensor,
        positions: Tensor,
        slot_mapping: Tensor,
        attention: AttentionBatch,
        kv_caches: Sequence[Tensor],
    ) -> None:
        """x [T, hidden] float32, changed in place; positions, slot_mapping [T] int64.

        Only the size of the caches matters here: ``heads.h`` documents how they are laid out.
        """
        tables = attention.block_tables
        rows = _Rows(
            *(len(attention.num_keys), array_address(attention.token_starts)),
            *(array_address(attention.num_keys), array_address(tables), tables.shape[1]),
            None if attention.first_keys is None else array_address(attention.first_keys),
        )
        caches = (_Pointer * len(kv_caches))(*(cache.data_ptr() for cache in kv_caches))
        step = _Step(
            *(ctypes.cast(caches, _Pointer), len(x), address(positions), address(slot_mapping)),
            *(rows, address(x), *self._scratch_of(len(x))),
        )
        shape, layers = ctypes.byref(self._shape), ctypes.byref(self._layers)
        self._library.layers(shape, layers, len(self._layers), ctypes.byref(step))

    def _scratch_of(self, num_tokens: int) -> list[Any]:
        shape, _ = self._keeps
        dtype = self._library.dtype
        heads = shape.num_heads * shape.head_dim
        all_heads = heads + 2 * shape.num_kv_heads * shape.head_dim
        sizes = {
            "normed": (shape.hidden_size, dtype),
            "heads": (all_heads, torch.float32),
            "query": (heads, dtype),
            "attended": (heads, dtype),
            "gated": (shape.intermediate_size, dtype),
        }
        if not self._scratch or self._scratch["heads"].numel() < num_tokens * all_heads:
            for name, (size, kind) in sizes.items():
                self._scratch[name] = torch.empty(num_tokens * size, dtype=kind)
        return [address(self._scratch[name]) for name in sizes]


def address(tensor: Tensor | None) -> Any:
    return None if tensor is None else _Pointer(tensor.data_ptr())


def array_address(array: np.ndarray) -> Any:
    if array.dtype != np.int64 or not array.flags.c_contiguous:
        raise ValueError(f"{array.dtype} array where contiguous int64 is wanted")
    return _Pointer(array.ctypes.data)
