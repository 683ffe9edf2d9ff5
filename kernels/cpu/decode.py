"""Several decoding steps in one call of the native library.

The structure is that of ``decode.h``, field by field.
"""

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from kernels.cpu.pointers import Int, Pointer, address, array_address
from kernels.cpu.program import GroupBlocks, KVPair, NativeProgram
from kernels.cpu.sampler import random_struct
from kernels.delta.states import States
from kernels.sample import RandomRows


class _DecodeGroup(ctypes.Structure):
    _fields_ = [(name, Pointer) for name in ("slot_mapping", "tables")]


class _DecodeRows(ctypes.Structure):
    _fields_ = [
        *((name, Int) for name in ("num_rows", "block_size")),
        *((name, Pointer) for name in ("ids", "positions", "num_keys", "groups")),
        *((name, Int) for name in ("num_groups", "table_stride", "num_random")),
        *((name, Pointer) for name in ("random_positions", "rooms", "ignores_eos")),
        *((name, Int) for name in ("num_eos", "vocab_size")),
        *((name, Pointer) for name in ("eos_ids", "logits", "random")),
        *((name, Pointer) for name in ("state_positions", "num_kept", "num_seen")),
    ]


class DecodeRows(NamedTuple):
    """R decoding rows, each with its last known id; the rows of ``random`` index into them. ``run``
    updates the arrays in place from step to step."""

    input_ids: Tensor  # [R] int32
    positions: Tensor  # [R] int64, of rotations
    groups: Sequence[GroupBlocks]
    kv_caches: Sequence[KVPair]
    random: RandomRows | None
    rooms: np.ndarray  # [R] int64: tokens that may follow, at least one
    ignores_eos: np.ndarray  # [R] bool
    states: States | None = None  # without drafts


class NativeDecoder:
    """``trunk`` maps ids to hidden states, and ``head`` these to logits; tokens in ``eos_ids`` [E]
    int64 end a row unless it ignores them. Not thread-safe: call it from the thread that runs the
    programs."""

    def __init__(self, trunk: NativeProgram, head: NativeProgram, eos_ids: np.ndarray) -> None:
        self._trunk = trunk
        self._head = head
        self._eos_ids = eos_ids

    def run(self, rows: DecodeRows, num_steps: int) -> np.ndarray:
        """Runs at most ``num_steps`` steps, until a row ends; each samples one token per row.
        Returns [n, R] int64: token ids, or a negative error code as in ``NativeSampler.sample``."""
        trunk = self._trunk.prepare(
            [rows.input_ids], rows.positions, rows.groups, rows.kv_caches, rows.states
        )
        head = self._head.prepare([trunk.out])
        (_, attention), random = rows.groups[0], rows.random
        groups = (_DecodeGroup * len(rows.groups))(*map(_group, rows.groups))
        drawn = random_struct(random)
        struct = _DecodeRows(
            *(len(rows.input_ids), attention.block_size),
            *(address(rows.input_ids), address(rows.positions), array_address(attention.num_keys)),
            *(ctypes.cast(groups, Pointer), len(groups), attention.block_tables.shape[1]),
            *(0, None) if random is None else (len(random.rows), address(random.positions)),
            *(array_address(rows.rooms), address(torch.from_numpy(rows.ignores_eos))),
            *(len(self._eos_ids), head.out.shape[1], array_address(self._eos_ids)),
            *(address(head.out), ctypes.cast(ctypes.byref(drawn), Pointer)),
        )
        if trunk.states is not None:
            struct.state_positions = trunk.states.positions
            struct.num_kept = trunk.states.num_kept
            struct.num_seen = trunk.states.num_seen
        tokens = np.empty((num_steps, len(rows.input_ids)), np.int64)
        programs = ctypes.byref(trunk.program), ctypes.byref(head.program)
        decode = self._trunk.library.decode
        num = decode(*programs, ctypes.byref(struct), num_steps, array_address(tokens))
        return tokens[:num]


def _group(blocks: GroupBlocks) -> _DecodeGroup:
    slot_mapping, attention = blocks
    return _DecodeGroup(address(slot_mapping), array_address(attention.block_tables))
