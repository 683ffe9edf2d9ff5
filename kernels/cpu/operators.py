"""Operators of a native program and their packed arguments.

The structures are those of ``program.h``, field by field. The objects that make them keep the
memory of their pointers alive.
"""

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor

from kernels.cpu.adapt import PackedAdapt
from kernels.cpu.delta import PackedDelta
from kernels.cpu.index import PackedIndex
from kernels.cpu.pointers import Float, Int, Pointer, address, place
from kernels.route import Routing
from kernels.silu_mul import Act, Clamp, constants_of
from kernels.sizes import cdiv

LANES = 16  # columns of a tile; head, hidden and block sizes are multiples of it
PACKED_DEPTH = 32  # tiles are zero-padded to a multiple of it
SHALLOW_DEPTH = 16  # or to this depth, if they are dense
MAX_HEAD_DIM = 512
MAX_GROUP_SIZE = 48  # query heads that share a KV head
MAX_RANK, MAX_ROPE_DIM, MAX_NOPE_DIM = 512, 64, 256  # of latents
DTYPES = (torch.bfloat16, torch.float32)


class Kind(IntEnum):
    """Operators, with their inputs and outputs: a wide buffer is float32, a narrow one of the
    library's type."""

    EMBED = 0  # ids → wide
    SCALE = 1  # wide, in place
    NORM = 2  # wide → wide or narrow
    NARROW = 3  # wide → narrow
    LINEAR = 4  # narrow → wide
    GATED = 5  # narrow → narrow
    ATTEND = 6  # wide, overwritten → narrow
    ORDER = 7  # narrow → narrow
    EXPERTS = 8  # narrow, and wide for the router → added to wide
    OPEN = 9  # wide, and wide for the gate → added to wide
    LATENT = 10  # wide, and chosen keys if it has a topk → narrow
    BEND = 11  # wide, in place
    SUM = 12  # wide of each rank → wide
    SHORT_CONV = 13  # wide → narrow
    GATED_DELTA = 14  # wide, and wide for the gates → narrow
    GATE = 15  # wide → narrow, in place
    ADAPT = 16  # narrow → wide, or added to wide: rows with adapters only
    ADD = 17  # wide → added to wide
    INDEX = 18  # wide → chosen keys, as int32 in wide
    JOIN = 19  # wide, and wide behind it → wide
    ACTIVATE = 20  # wide, and wide for the factors → narrow
    ADAPT_EMBEDDINGS = 21  # ids → added to wide: rows with adapters only
    LAYER_NORM = 22  # wide → wide or narrow
    GELU = 23  # narrow → narrow


class Form(IntEnum):
    """Form of a packed matrix: dense in the library's type, or codes with a scale per output or per
    group of inputs."""

    DENSE = 0
    INT8 = 1
    GROUPED_INT4 = 2
    GROUPED_INT8 = 3
    GROUPED_FP8 = 4


class Score(IntEnum):
    """``Routing.score`` of ``kernels.route``."""

    SOFTMAX = 0
    SIGMOID = 1
    SOFTMAX_OF_CHOSEN = 2


class Cached(IntEnum):
    """Element type of the KV caches."""

    NUMBERS = 0  # the library's type
    INT8_CODES = 1
    FP8_CODES = 2


class MatrixStruct(ctypes.Structure):
    _fields_ = [
        *((name, Pointer) for name in ("tiles", "bias", "scales", "table")),
        *((name, Int) for name in ("n", "k", "form", "group", "has_zeros", "is_wide", "rounds")),
    ]


class HeadsStruct(ctypes.Structure):
    _fields_ = [
        *((name, Int) for name in ("num_heads", "num_kv_heads", "head_dim", "rotary_dim")),
        *((name, Int) for name in ("is_interleaved", "norms_tokens", "window", "is_causal")),
        *((name, Float) for name in ("eps", "scale", "softcap")),
        *((name, Pointer) for name in ("query_norm", "key_norm", "cos", "sin", "sinks")),
    ]


class ExpertsStruct(ctypes.Structure):
    arrays: list[Any]  # targets of the pointers

    _fields_ = [
        *((name, Int) for name in ("num_experts", "num_chosen", "score")),
        *((name, Int) for name in ("num_groups", "num_kept_groups", "group_best")),
        ("renormalises", Int),
        *((name, Float) for name in ("min_sum", "factor")),
        *((name, Pointer) for name in ("correction", "factors")),
        ("router", MatrixStruct),
        *((name, Pointer) for name in ("gate_up", "down")),
        *((name, Float) for name in ("alpha", "beta", "limit")),
        *((name, Int) for name in ("first", "num")),
        ("counts", Pointer),
    ]


class OperatorStruct(ctypes.Structure):
    _fields_ = [
        *((name, Int) for name in ("kind", "in", "out", "second", "layer", "group", "size")),
        *((name, Int) for name in ("is_wide", "adds", "first", "num")),
        *((name, Float) for name in ("scale", "eps", "alpha", "beta")),
        ("norm", Pointer),
        ("weight", MatrixStruct),
        *((name, Pointer) for name in ("rows", "heads", "order", "experts", "latents")),
        *((name, Pointer) for name in ("columns", "delta", "adapt", "index")),
    ]


class LatentsStruct(ctypes.Structure):
    _fields_ = [
        *((name, Int) for name in ("latent", "queries", "attended")),
        *((name, Int) for name in ("num_heads", "rank", "nope_dim", "rope_dim", "value_dim")),
        *((name, Int) for name in ("is_interleaved", "topk")),
        *((name, Float) for name in ("eps", "scale")),
        *((name, Pointer) for name in ("norm", "cos", "sin")),
        *((name, MatrixStruct) for name in ("keys", "values")),
    ]


class ColumnsStruct(ctypes.Structure):
    _fields_ = [
        *((name, Int) for name in ("num_parts", "part", "width")),
        *((name, Pointer) for name in ("weight", "bias")),
    ]


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """A weight [n, k] as tiles of 16 outputs, see ``product.h``."""

    tiles: Tensor  # flat
    bias: Tensor | None  # [n] float32
    n: int
    k: int
    form: Form = Form.DENSE
    # [n] float32 per output; or per group, flat, float32 or bfloat16, followed by the zeros.
    scales: Tensor | None = None
    group: int = 0
    has_zeros: bool = False
    table: Tensor | None = None  # [32] float32: values of 4-bit codes, see ``simd.h``
    rounds: bool = False  # activations are rounded to 8 bits, see ``rounded.h``

    def struct(self) -> MatrixStruct:
        is_wide = self.scales is not None and self.scales.dtype == torch.float32
        return MatrixStruct(
            *(address(each) for each in (self.tiles, self.bias, self.scales, self.table)),
            *(self.n, self.k, self.form, self.group, self.has_zeros, is_wide, self.rounds),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedHeads:
    """``cos`` and ``sin`` [positions, rotary_dim] float32 are the table of the rotation. Norms are
    float32 [head_dim], or span all heads of a token if ``norms_tokens``; ``sinks`` [num_heads]
    float32. If it ``is_causal``, ``ends`` of rows have no effect."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    cos: Tensor
    sin: Tensor
    is_interleaved: bool
    window: int | None
    softcap: float | None
    sinks: Tensor | None
    query_norm: Tensor | None
    key_norm: Tensor | None
    norms_tokens: bool
    eps: float
    is_causal: bool = False

    def struct(self) -> HeadsStruct:
        return HeadsStruct(
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            rotary_dim=self.cos.shape[1],
            is_interleaved=self.is_interleaved,
            norms_tokens=self.norms_tokens,
            window=self.window or 0,
            is_causal=self.is_causal,
            eps=self.eps,
            scale=self.scale,
            softcap=self.softcap or 0.0,
            query_norm=address(self.query_norm),
            key_norm=address(self.key_norm),
            cos=address(self.cos),
            sin=address(self.sin),
            sinks=address(self.sinks),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedLatents:
    """``latent``, ``queries`` and ``attended`` are buffers. ``cos`` and ``sin`` [positions,
    rope_dim] and ``norm`` [rank] are float32; ``keys`` has ``rank`` outputs per head, ``values``
    has ``value_dim``. ``topk``: see ``kernels.index``; 0: tokens attend to all keys."""

    latent: int
    queries: int
    attended: int
    num_heads: int
    rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    is_interleaved: bool
    eps: float
    scale: float
    norm: Tensor
    cos: Tensor
    sin: Tensor
    keys: PackedMatrix
    values: PackedMatrix
    topk: int = 0

    def struct(self) -> LatentsStruct:
        return LatentsStruct(
            *(self.latent, self.queries, self.attended),
            *(self.num_heads, self.rank, self.nope_dim, self.rope_dim, self.value_dim),
            *(self.is_interleaved, self.topk, self.eps, self.scale),
            *(address(each) for each in (self.norm, self.cos, self.sin)),
            *(self.keys.struct(), self.values.struct()),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedExperts:
    """``router``, ``correction`` and ``factors`` of weights [num_experts] are float32. All experts
    have one form; this process holds consecutive ones from ``first`` on. ``counts`` [num_experts]
    int64, if given, is incremented by the tokens of each expert."""

    routing: Routing
    router: PackedMatrix
    correction: Tensor | None
    gate_up: list[PackedMatrix]
    down: list[PackedMatrix]
    act: Act | Clamp = "silu"
    first: int = 0
    counts: Tensor | None = None
    factors: Tensor | None = None

    def struct(self) -> ExpertsStruct:
        routing = self.routing
        experts = ExpertsStruct(
            *(self.router.n, routing.num_chosen, Score[routing.score.upper()]),
            *(routing.num_groups, routing.num_kept_groups, routing.group_best),
            *(routing.min_sum is not None, routing.min_sum or 0.0, routing.factor),
            *(address(self.correction), address(self.factors), self.router.struct()),
        )
        experts.arrays = [_structs(self.gate_up), _structs(self.down)]
        experts.gate_up, experts.down = map(ctypes.addressof, experts.arrays)
        experts.alpha, experts.beta, limit = constants_of(self.act)
        experts.limit = limit or 0.0
        experts.first, experts.num = self.first, len(self.gate_up)
        experts.counts = address(self.counts)
        return experts


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedColumns:
    """``weight`` [width, size] and ``bias`` [size] of a short convolution, float32; the cache has
    ``num_parts`` parts of a token."""

    num_parts: int
    part: int
    width: int
    weight: Tensor
    bias: Tensor | None

    def struct(self) -> ColumnsStruct:
        return ColumnsStruct(
            num_parts=self.num_parts,
            part=self.part,
            width=self.width,
            weight=address(self.weight),
            bias=address(self.bias),
        )


Part = (
    PackedHeads
    | PackedExperts
    | PackedLatents
    | PackedColumns
    | PackedDelta
    | PackedAdapt
    | PackedIndex
)


def whole_tiles(num: int) -> int:
    """``num`` outputs, filled up to a multiple of ``LANES``."""
    return cdiv(num, LANES) * LANES


def packed_depth(k: int, itemsize: int) -> int:
    """The depth of tiles with elements of ``itemsize`` bytes."""
    if itemsize > 1 and k <= SHALLOW_DEPTH:
        return SHALLOW_DEPTH
    return cdiv(k, PACKED_DEPTH) * PACKED_DEPTH


def tensors_in(part: object) -> Iterator[Tensor]:
    """The tensors that an operator or a part of one reads."""
    if isinstance(part, Tensor):
        yield part
    elif isinstance(part, list | tuple):
        for each in part:
            yield from tensors_in(each)
    elif is_dataclass(part):
        yield from tensors_in([getattr(part, each.name) for each in fields(part)])


def _structs(matrices: list[PackedMatrix]) -> ctypes.Array[MatrixStruct]:
    return (MatrixStruct * len(matrices))(*(each.struct() for each in matrices))


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """``source``, ``out`` and ``second`` are buffers of the program; ``size`` is the row size of
    ``source``, or of ``out`` for an embedding.

    ``adds``: the result is added to ``out``. ``rows``: embeddings [num, size] of the ``num`` tokens
    from ``first`` on, unless they are the columns of ``weight``; for a sum or a layer norm, a bias
    [size] float32.
    ``order`` [size] int64: a permutation of the elements. For experts ``first`` may be a buffer of
    marks [tokens, size]: if ``num`` is 1, tokens without one take them, if it is 2, those with one.
    A norm may have ``num`` parts of ``size`` in a row; attention norms values if ``num`` is 1;
    gates have factors from ``first`` on in rows of ``num`` elements.
    """

    kind: Kind
    source: int
    out: int
    size: int
    second: int = 0
    layer: int = 0
    group: int = 0
    is_wide: bool = False
    adds: bool = False
    first: int = 0
    num: int = 0
    scale: float = 1.0
    act: Act = "silu"
    eps: float = 0.0
    norm: Tensor | None = None
    weight: PackedMatrix | None = None
    rows: Tensor | None = None
    heads: PackedHeads | None = None
    order: Tensor | None = None
    experts: PackedExperts | None = None
    latents: PackedLatents | None = None
    columns: PackedColumns | None = None
    delta: PackedDelta | None = None
    adapt: PackedAdapt | None = None
    index: PackedIndex | None = None

    @property
    def parts(self) -> tuple[Part | None, ...]:
        of_layers = self.heads, self.experts, self.latents, self.columns, self.delta
        return *of_layers, self.adapt, self.index

    def struct(self, parts: Sequence[ctypes.Structure | None]) -> OperatorStruct:
        """``parts`` are the structures of the operator's own; the caller must keep them alive."""
        matrix = MatrixStruct() if self.weight is None else self.weight.struct()
        heads, *others = map(place, parts)
        return OperatorStruct(
            *(self.kind, self.source, self.out, self.second, self.layer, self.group, self.size),
            *(self.is_wide, self.adds, self.first, self.num),
            *(self.scale, self.eps, *constants_of(self.act)[:2]),
            *(address(self.norm), matrix),
            *(address(self.rows), heads, address(self.order), *others),
        )
