"""The states of sequences on a device, where the step that runs knows their positions.

As in ``state_pool.py``, slots have active states, and copies follow them. All layers' parts of a
state lie together, so that one launch copies them.
"""

import math
from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from kernels.delta import LayerStates
from kernels.delta.device import DeviceStates, device_rows
from kernels.paged_attention import ChunkRows, DecodeRows
from kernels.sizes import ALIGNED, cdiv
from services.worker.machine.state_pool import NO_COPY, StateSpec
from services.worker.machine.streams import upload
from shared.wire.kv_groups import copy_interval
from shared.wire.messages import Admit, Capacity, StepPlan

LINE = 32  # numbers: parts of layers begin at lines of 128 bytes


class DeviceStatePool:
    """The states of ``specs``, one for each layer with a state. In a trial, which no one reads, all
    slots share one."""

    def __init__(
        self,
        specs: Sequence[StateSpec],
        capacity: Capacity,
        device: torch.device,
        *,
        is_trial: bool = False,
    ) -> None:
        num_slots, most_drafts = capacity.max_num_seqs, capacity.num_speculative_tokens
        num_states = num_slots + (capacity.num_states or 0)

        def zeros(num: int, *shape: int) -> Tensor:
            shared = torch.zeros(1 if is_trial else num, *shape, device=device)
            return shared.expand(num, *shape) if is_trial else shared

        sizes = [
            cdiv(size, LINE) * LINE
            for each in specs
            for size in (each.num_heads * each.key_dim * each.value_dim, each.width * each.channels)
        ]
        starts = iter(accumulate(sizes, initial=0))
        self._memory = zeros(num_states, sum(sizes))
        self.layers = [
            LayerStates(
                self._part(next(starts), (each.num_heads, each.key_dim, each.value_dim)),
                self._part(next(starts), (each.width, each.channels)),
                zeros(num_slots, most_drafts, each.channels + each.num_gates),
            )
            for each in specs
        ]
        num_padded = cdiv(num_slots + 1, ALIGNED) * ALIGNED  # with the null slot
        integers = torch.zeros(len(specs) + 1, num_padded, dtype=torch.int32, device=device)
        self._positions = integers[:-1, : num_slots + 1]  # [layers, N]: ids that a state has seen
        self._copies = integers[-1, : num_slots + 1].fill_(NO_COPY)
        self._interval = copy_interval(capacity.block_size)
        self._first_copy = num_slots
        self._device = device

    def apply(self, plan: StepPlan) -> None:
        """Begins the states of admitted sequences. Raises ValueError if one lacks a copy."""
        if not self.layers:
            return
        copies = {row.slot: self._place(row.to_state) for row in plan.keeps}
        copies |= {row.slot: self._place(row.to_state) for row in plan.admit}
        if copies:
            slots, places = upload(np.array([*copies.items()]).T, self._device)
            self._copies[slots] = places.int()
        for row in plan.admit:
            self._begin(row)

    def of_step(
        self,
        decode: DecodeRows | None,
        num_valid: Tensor,
        chunks: ChunkRows | None,
        num_tokens: int,
    ) -> DeviceStates | None:
        """The states of a step of T tokens; ``num_valid`` [B] int32 are those of decode rows. None
        for a model without states."""
        if not self.layers:
            return None
        positions = self._positions.unbind()
        of_slots = positions[0], self._copies, self._interval
        rows = device_rows(decode, num_valid, chunks, num_tokens, *of_slots)
        return DeviceStates(self.layers, positions, rows)

    def _begin(self, row: Admit) -> None:
        self._positions[:, row.slot] = row.num_cached
        if row.from_state is not None:
            self._memory[row.slot].copy_(self._memory[self._place(row.from_state)])
        elif not row.num_cached:
            self._memory[row.slot].zero_()
        else:
            raise ValueError(f"slot {row.slot} begins with {row.num_cached} ids without a state")

    def _part(self, start: int, shape: tuple[int, ...]) -> Tensor:
        """[states, *shape] of the numbers of each state from ``start`` on."""
        part: Tensor = self._memory[:, start : start + math.prod(shape)].unflatten(1, shape)
        return part

    def _place(self, copy: int | None) -> int:
        return NO_COPY if copy is None else self._first_copy + copy
