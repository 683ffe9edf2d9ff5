"""A forward pass as a list of operators, run by the native library in one call."""

import ctypes
from collections.abc import Sequence, Set
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.cpu.collectives import check_wires
from kernels.cpu.delta import StateLayers, StateRowsStruct, state_rows
from kernels.cpu.operators import Cached, Operator, OperatorStruct
from kernels.cpu.packing import NativeLibrary
from kernels.cpu.pointers import Int, Pointer, address, array_address
from kernels.delta.states import States
from kernels.paged_attention import AttentionBatch


class _Rows(ctypes.Structure):
    _fields_ = [
        ("num_rows", Int),
        *((name, Pointer) for name in ("starts", "num_keys", "tables")),
        ("table_stride", Int),
        *((name, Pointer) for name in ("first_keys", "ends")),
    ]


class _GroupStruct(ctypes.Structure):
    _fields_ = [("slot_mapping", Pointer), ("rows", _Rows)]


class StepStruct(ctypes.Structure):
    _fields_ = [
        *((name, Int) for name in ("num_tokens", "block_size")),
        *((name, Pointer) for name in ("positions", "groups")),
        *((name, Pointer) for name in ("caches", "scales", "strides", "buffers")),
        ("cached", Int),
        *((name, Pointer) for name in ("layer_states", "state_rows")),
    ]


class ProgramStruct(ctypes.Structure):
    _fields_ = [
        ("operators", ctypes.POINTER(OperatorStruct)),
        ("num_operators", Int),
        ("step", ctypes.POINTER(StepStruct)),
    ]


class Prepared(NamedTuple):
    """Arguments of a prepared step, the memory that they point to, and its output tensor."""

    program: ProgramStruct
    groups: "ctypes.Array[_GroupStruct] | None"
    states: StateRowsStruct | None
    out: Tensor


class Buffer(NamedTuple):
    """[T, size]"""

    size: int
    dtype: torch.dtype


# The entries of a layer, and their scales if they are quantized.
KVPair = tuple[Tensor, Tensor | None]


# The blocks of T tokens in one group of layers: the slot mapping [T] int64, and their rows.
GroupBlocks = tuple[Tensor, AttentionBatch]


class _Caches:
    """Addresses of all layers' caches, and the element type of the ``coded`` layers, which may be
    quantized. Raises ValueError if these differ in type or lack scales, ``plain`` ones are
    quantized, or the blocks of ``dense`` ones are not contiguous."""

    def __init__(
        self,
        pairs: Sequence[KVPair],
        dtype: torch.dtype,
        coded: Set[int] = frozenset(),
        plain: Set[int] = frozenset(),
        dense: Set[int] = frozenset(),
    ) -> None:
        self.pairs = pairs
        self.entries = (Pointer * len(pairs))(*(entries.data_ptr() for entries, _ in pairs))
        self.scales = (Pointer * len(pairs))(*(address(scales) for _, scales in pairs))
        strides = [0 if each is None else each.stride(0) for pair in pairs for each in pair]
        self.strides = (ctypes.c_int64 * len(strides))(*strides)
        if not all(pairs[layer][0].is_contiguous() for layer in dense):
            raise ValueError("the blocks of latents, or of an index, are not contiguous")
        known = {
            dtype: Cached.NUMBERS,
            torch.int8: Cached.INT8_CODES,
            torch.uint8: Cached.FP8_CODES,
        }
        kinds = [(entries.dtype, scales is not None) for entries, scales in pairs]
        found, others = ({kinds[layer] for layer in layers} for layers in (coded, plain))
        (stored, has_scales), *more = found or {(dtype, False)}
        is_known = stored in known and has_scales == (known[stored] != Cached.NUMBERS)
        if more or not is_known or others - {(dtype, False)}:
            raise ValueError(f"unsupported or mixed KV caches (dtype, has scales): {kinds}")
        self.cached = known[stored]


class NativeProgram:
    """Operators in order, over buffers with one row per token. Programs of a process share the
    library's memory, so one thread must run them all.

    The first buffers are the inputs, in order. ``output`` is the returned buffer; if it is an
    input, operators update it in place.
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
        self._parts = [
            [None if part is None else part.struct() for part in each.parts] for each in operators
        ]
        self._structs = (OperatorStruct * len(operators))(
            *(each.struct(parts) for each, parts in zip(operators, self._parts, strict=True))
        )
        self._places = (Pointer * len(buffers))()
        self._scratch = set(range(num_inputs, len(buffers))) - {output}
        self._gives_input = output < num_inputs
        self._tensors: dict[int, Tensor] = {}
        self._room = 0  # tokens the buffers have room for
        self._caches = _Caches((), library.dtype)
        self._coded = {each.layer for each in operators if each.heads or each.latents}
        self._plain = {each.layer for each in operators if each.index or each.columns}
        self._dense = {each.layer for each in operators if each.latents or each.index}
        self._has_states = any(each.delta is not None for each in operators)
        self._state_layers = StateLayers(())

    def run(
        self,
        inputs: Sequence[Tensor],
        positions: Tensor | None = None,
        groups: Sequence[GroupBlocks] = (),
        kv_caches: Sequence[KVPair] = (),
        states: States | None = None,
    ) -> Tensor:
        """Prepares a step and runs it; arguments as in ``prepare``."""
        prepared = self.prepare(inputs, positions, groups, kv_caches, states)
        check_wires(self.library.run(self._structs, len(self._structs), prepared.program.step))
        return prepared.out

    def prepare(
        self,
        inputs: Sequence[Tensor],
        positions: Tensor | None = None,
        groups: Sequence[GroupBlocks] = (),
        kv_caches: Sequence[KVPair] = (),
        states: States | None = None,
    ) -> Prepared:
        """inputs [T, …] each float32, or int32 ids; positions [T] int64. Programs with attention
        need these, the groups of layers and the caches; programs with the gated delta rule need
        ``states``. Returns a step with output [T, size] float32, whose memory the next prepared
        step reuses.

        ``kv_caches`` and the layers' states are usually the same lists in every run. ``cache.h``
        documents the layout; only the strides of caches and scales are read here. Caches of heads
        and latents have the library's type, or all the same quantized type.
        """
        num_tokens = len(inputs[0])
        places = [slot_mapping for slot_mapping, _ in groups]
        places += [] if positions is None else [positions]
        if any(len(each) != num_tokens for each in (*inputs, *places)):
            raise ValueError("inputs, positions and slot mappings differ in their number of tokens")
        if any(each.dtype != torch.int64 or not each.is_contiguous() for each in places):
            raise ValueError("positions or slot mappings are not int64, or not contiguous")
        out = inputs[self._output] if self._gives_input else self._out(num_tokens)
        for place, tensor in enumerate(inputs):
            if not tensor.is_contiguous() or tensor.dtype not in (torch.float32, torch.int32):
                raise ValueError(f"{tensor.dtype} input {place}, or not contiguous")
            self._places[place] = tensor.data_ptr()
        self._places[self._output] = out.data_ptr()
        self._make_room(num_tokens)
        if kv_caches is not self._caches.pairs:
            kinds = self._coded, self._plain, self._dense
            self._caches = _Caches(kv_caches, self.library.dtype, *kinds)
        structs = (_GroupStruct * len(groups))(*map(_group, groups)) if groups else None
        step = StepStruct(
            num_tokens=num_tokens,
            block_size=groups[0][1].block_size if groups else 0,
            positions=address(positions),
            groups=None if structs is None else ctypes.addressof(structs),
            caches=ctypes.cast(self._caches.entries, Pointer),
            scales=ctypes.cast(self._caches.scales, Pointer),
            strides=ctypes.cast(self._caches.strides, Pointer),
            buffers=ctypes.cast(self._places, Pointer),
            cached=self._caches.cached,
        )
        rows = self._add_states(step, states) if self._has_states else None
        program = ProgramStruct(self._structs, len(self._structs), ctypes.pointer(step))
        return Prepared(program, structs, rows, out)

    def _add_states(self, step: StepStruct, states: States | None) -> StateRowsStruct:
        if states is None:
            raise ValueError("a program with the gated delta rule needs states")
        layers, rows = states
        if layers is not self._state_layers.layers:
            for each in self.operators:
                if each.delta is not None:
                    each.delta.check(layers[each.layer])
            self._state_layers = StateLayers(layers)
        struct = state_rows(rows)
        step.layer_states = ctypes.addressof(self._state_layers.structs)
        step.state_rows = ctypes.addressof(struct)
        return struct

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


def _group(blocks: GroupBlocks) -> _GroupStruct:
    slot_mapping, attention = blocks
    return _GroupStruct(address(slot_mapping), _rows(attention))


def _rows(attention: AttentionBatch) -> _Rows:
    tables, more = attention.block_tables, (attention.first_keys, attention.ends)
    return _Rows(
        len(attention.num_keys),
        array_address(attention.token_starts),
        array_address(attention.num_keys),
        array_address(tables),
        tables.shape[1],
        *(None if each is None else array_address(each) for each in more),
    )
