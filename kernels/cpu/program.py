"""A forward pass as a list of operators that the native library runs in one call."""

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from kernels.codes import Codes
from kernels.cpu.meeting import check_wires
from kernels.cpu.memory import Arena
from kernels.cpu.operators import (
    LANES,
    PACKED_DEPTH,
    Cached,
    Form,
    Int,
    Operator,
    OperatorStruct,
    PackedMatrix,
    Pointer,
    address,
    array_address,
)
from kernels.paged_attention import AttentionBatch

GROUPS = (128, 64, 32, 16)  # sizes that native code knows; a larger one is several of equal scales


class _Rows(ctypes.Structure):
    _fields_ = [
        ("num_rows", Int),
        *((name, Pointer) for name in ("starts", "num_keys", "tables")),
        ("table_stride", Int),
        ("first_keys", Pointer),
    ]


class StepStruct(ctypes.Structure):
    _fields_ = [
        *((name, Int) for name in ("num_tokens", "block_size")),
        *((name, Pointer) for name in ("positions", "slot_mapping")),
        ("rows", _Rows),
        *((name, Pointer) for name in ("caches", "scales", "buffers")),
        ("cached", Int),
    ]


class ProgramStruct(ctypes.Structure):
    _fields_ = [
        ("operators", ctypes.POINTER(OperatorStruct)),
        ("num_operators", Int),
        ("step", ctypes.POINTER(StepStruct)),
    ]


class Prepared(NamedTuple):
    """A step of a program, and where what comes out of it will be."""

    program: ProgramStruct
    out: Tensor


class Buffer(NamedTuple):
    """[T, size]"""

    size: int
    dtype: torch.dtype


FORMS = {
    torch.uint8: Form.GROUPED_INT4,
    torch.int8: Form.GROUPED_INT8,
    torch.float8_e4m3fn: Form.GROUPED_FP8,
}


class NativeLibrary:
    """The functions of a library for weights of one type, ``DTYPES``.

    With ``rounds`` what weights in whole numbers are multiplied with becomes codes of eight bits
    first; raises ValueError where the library cannot (``can_round``).
    """

    def __init__(
        self, library: ctypes.CDLL, dtype: torch.dtype, num_threads: int, *, rounds: bool = False
    ) -> None:
        if rounds and not can_round(library):
            raise ValueError("this library does not round what is multiplied")
        name = str(dtype).removeprefix("torch.")
        self.dtype = dtype
        self._rounds = rounds
        self._arena = Arena()
        self._pack = {
            torch.float32: library["shoal_pack_float32"],
            dtype: library[f"shoal_pack_{name}"],
            torch.int8: library["shoal_pack_int8"],
            torch.float8_e4m3fn: library["shoal_pack_int8"],
            torch.uint8: library["shoal_pack_int4"],
        }
        self.run = library[f"shoal_run_{name}"]
        self.decode = library[f"shoal_decode_{name}"]
        library["shoal_start"](num_threads)

    def pack(
        self,
        weight: Tensor,
        bias: Tensor | None = None,
        order: np.ndarray | None = None,
        dtype: torch.dtype | None = None,
    ) -> PackedMatrix:
        """weight [n, k], bias [n]; ``order`` [n] int64: which row becomes which output. ``dtype``
        is the library's or float32."""
        n, k = weight.shape
        order = np.arange(n) if order is None else order
        tiles = self._tiles(weight.to(dtype or self.dtype), order, k)
        return PackedMatrix(tiles, _in_order(bias, order), n, k)

    def pack_codes(
        self, codes: Codes, bias: Tensor | None = None, order: np.ndarray | None = None
    ) -> PackedMatrix:
        """Does the same with a weight in codes, whose inputs come in their order. Raises ValueError
        where ``why_not_packed`` says why."""
        if why := why_not_packed(codes.inputs, codes.group):
            raise ValueError(why)
        n, k = len(codes.codes), codes.inputs
        order = np.arange(n) if order is None else order
        tiles = self._tiles(codes.codes, order, k)
        bias = _in_order(bias, order)
        num_groups = codes.scales.shape[1]
        if packed_form(codes) == Form.INT8:
            scales = _in_order(codes.scales[:, 0], order)
            return PackedMatrix(tiles, bias, n, k, Form.INT8, scales, rounds=self._rounds)
        group = next(size for size in GROUPS if num_groups == 1 or codes.group % size == 0)
        parts = [each for each in (codes.scales, codes.zeros) if each is not None]
        dtype = (
            torch.float32 if any(each.dtype == torch.float32 for each in parts) else torch.bfloat16
        )
        tiled = [_in_tiles(each, order, codes.group, group, k).to(dtype) for each in parts]
        scales = self._kept(torch.cat(tiled))
        table = None if codes.table is None else self._kept(_wide_and_narrow(codes.table))
        form = packed_form(codes)
        rounds = self._rounds and is_whole(codes)
        return PackedMatrix(tiles, bias, n, k, form, scales, group, len(parts) == 2, table, rounds)

    def _tiles(self, numbers: Tensor, order: np.ndarray, k: int) -> Tensor:
        numbers = numbers.contiguous()
        num_columns, depth = _filled_up(len(order), LANES), _filled_up(k, PACKED_DEPTH)
        per_place = -(-k // numbers.shape[1])
        tiles = self._arena.empty(num_columns * depth // per_place, numbers.dtype)
        pack = self._pack[numbers.dtype]
        pack(address(numbers), array_address(order), len(order), k, address(tiles))
        return tiles

    def _kept(self, tensor: Tensor) -> Tensor:
        kept: Tensor = self._arena.empty(tensor.numel(), tensor.dtype)
        kept.copy_(tensor.flatten())
        return kept


def packed_form(codes: Codes) -> Form:
    if codes.codes.dtype == torch.int8 and codes.num_groups == 1 and codes.zeros is None:
        return Form.INT8
    return FORMS[codes.codes.dtype]


def can_round(library: ctypes.CDLL) -> bool:
    return bool(library["shoal_can_round"]())


def is_whole(codes: Codes) -> bool:
    """Whether its numbers are whole, −128 … 127 or −8 … 7, so that rows may be rounded for it."""
    return codes.first == -8 or codes.codes.dtype == torch.int8


def why_not_packed(inputs: int, group: int) -> str | None:
    """Why native code cannot have codes of which so many inputs share a scale."""
    if inputs % LANES:
        return f"{inputs} inputs are no multiple of {LANES}"
    if group < inputs and group % LANES:
        return f"groups of {group} inputs are no multiple of {LANES}"
    return None


def _in_tiles(numbers: Tensor, order: np.ndarray, group: int, size: int, k: int) -> Tensor:
    """numbers [n, groups] of groups of ``group`` → flat [tiles][groups][LANES] of groups of
    ``size``."""
    columns = torch.zeros(_filled_up(len(order), LANES), -(-k // size), dtype=numbers.dtype)
    each = numbers.repeat_interleave(max(1, -(-min(group, k) // size)), 1)
    columns[: len(order)] = each[torch.from_numpy(order), : columns.shape[1]]
    return columns.view(-1, LANES, columns.shape[1]).transpose(1, 2).flatten()


def _wide_and_narrow(table: Tensor) -> Tensor:
    """table [16] → [32] float32: itself, and twice in bfloat16."""
    narrow = table.to(torch.bfloat16).repeat(2).view(torch.float32)
    return torch.cat([table.float(), narrow])


def _filled_up(num: int, unit: int) -> int:
    return -(-num // unit) * unit


def _in_order(tensor: Tensor | None, order: np.ndarray) -> Tensor | None:
    """tensor [n] in float32"""
    return None if tensor is None else tensor.float()[torch.from_numpy(order)].contiguous()


def gate_up_order(size: int) -> np.ndarray:
    """The order of the rows of gates over ups, [2 · size]: tile by tile in turns."""
    tiles = np.arange(2 * size).reshape(2, -1, LANES)
    return np.ascontiguousarray(tiles.swapaxes(0, 1)).ravel()


# The entries of a layer, and their scales where they are codes.
KVPair = tuple[Tensor, Tensor | None]


class _Caches:
    """Where the caches of all layers lie, and what they hold: numbers of ``dtype`` or codes. Raises
    ValueError where they are not alike, or lack scales."""

    def __init__(self, pairs: Sequence[KVPair], dtype: torch.dtype) -> None:
        self.pairs = pairs
        self.entries = (Pointer * len(pairs))(*(entries.data_ptr() for entries, _ in pairs))
        self.scales = (Pointer * len(pairs))(*(address(scales) for _, scales in pairs))
        known = {
            dtype: Cached.NUMBERS,
            torch.int8: Cached.INT8_CODES,
            torch.uint8: Cached.FP8_CODES,
        }
        found = {(entries.dtype, scales is not None) for entries, scales in pairs}
        (stored, has_scales), *others = found or {(dtype, False)}
        if others or stored not in known or has_scales != (known[stored] != Cached.NUMBERS):
            raise ValueError(f"caches of types {found}, where True is one with scales")
        self.cached = known[stored]


class NativeProgram:
    """Operators in order, over buffers of a row for each of T tokens. All programs of a process are
    to be used by one thread: they share the library's memory.

    The first buffers are its inputs, in order, and ``output`` is the one that is given back: where
    that is an input, as the operators leave it.
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
        self.library = library
        self._buffers = buffers
        self._output = output
        self._heads = [each.heads.struct() if each.heads else None for each in operators]
        self._experts = [each.experts.struct() if each.experts else None for each in operators]
        self._latents = [each.latents.struct() if each.latents else None for each in operators]
        parts = zip(operators, self._heads, self._experts, self._latents, strict=True)
        self._structs = (OperatorStruct * len(operators))(
            *(each.struct(heads, experts, latents) for each, heads, experts, latents in parts)
        )
        self._places = (Pointer * len(buffers))()
        self._scratch = set(range(num_inputs, len(buffers))) - {output}
        self._gives_input = output < num_inputs
        self._tensors: dict[int, Tensor] = {}
        self._room = 0  # tokens that those have room for
        self._caches = _Caches((), library.dtype)

    def run(
        self,
        inputs: Sequence[Tensor],
        positions: Tensor | None = None,
        slot_mapping: Tensor | None = None,
        attention: AttentionBatch | None = None,
        kv_caches: Sequence[KVPair] = (),
    ) -> Tensor:
        """Computes what ``prepare`` has prepared."""
        prepared = self.prepare(inputs, positions, slot_mapping, attention, kv_caches)
        check_wires(self.library.run(self._structs, len(self._structs), prepared.program.step))
        return prepared.out

    def prepare(
        self,
        inputs: Sequence[Tensor],
        positions: Tensor | None = None,
        slot_mapping: Tensor | None = None,
        attention: AttentionBatch | None = None,
        kv_caches: Sequence[KVPair] = (),
    ) -> Prepared:
        """inputs [T, …] each: float32, or int32 where they are ids; positions, slot_mapping [T]
        int64, which a program that attends needs with the rest. What comes out is [T, size]
        float32. One step at a time is prepared, and has the memory of the next.

        ``kv_caches`` are the same list in every run, as a rule. Only the size of caches and scales
        matters here: ``cache.h`` documents how they are laid out. All caches have numbers of the
        library's type, or all have codes of one type.
        """
        num_tokens = len(inputs[0])
        places = [each for each in (positions, slot_mapping) if each is not None]
        if any(len(each) != num_tokens for each in (*inputs, *places)):
            raise ValueError("inputs, positions and slot_mapping are not of the same tokens")
        if any(each.dtype != torch.int64 or not each.is_contiguous() for each in places):
            raise ValueError("positions or slot_mapping are not int64, or not contiguous")
        out = inputs[self._output] if self._gives_input else self._out(num_tokens)
        for place, tensor in enumerate(inputs):
            if not tensor.is_contiguous() or tensor.dtype not in (torch.float32, torch.int32):
                raise ValueError(f"{tensor.dtype} input {place}, or not contiguous")
            self._places[place] = tensor.data_ptr()
        self._places[self._output] = out.data_ptr()
        self._make_room(num_tokens)
        if kv_caches is not self._caches.pairs:
            self._caches = _Caches(kv_caches, self.library.dtype)
        step = StepStruct(
            num_tokens=num_tokens,
            block_size=0 if attention is None else attention.block_size,
            positions=address(positions),
            slot_mapping=address(slot_mapping),
            rows=_Rows() if attention is None else _rows(attention),
            caches=ctypes.cast(self._caches.entries, Pointer),
            scales=ctypes.cast(self._caches.scales, Pointer),
            buffers=ctypes.cast(self._places, Pointer),
            cached=self._caches.cached,
        )
        return Prepared(ProgramStruct(self._structs, len(self._structs), ctypes.pointer(step)), out)

    def _out(self, num_tokens: int) -> Tensor:
        return torch.empty(num_tokens, self._buffers[self._output].size)

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
