"""The states of sequences in layers with a state, beside the KV cache.

A slot has an active state, which the steps of its sequence advance. Its copies are for later
sequences with the same beginning: the scheduler decides about their places.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from kernels.cpu.memory import huge_zeros
from kernels.delta import LayerStates, StateRows
from shared.wire.kv_groups import copy_interval
from shared.wire.messages import Admit, Capacity, StepPlan

FLOAT_BYTES = 4
NO_COPY = -1


class StateSpec(NamedTuple):
    """The state of a layer on this rank: a float32 matrix of each of ``num_heads``, and the last
    ``width`` inputs of a convolution over ``channels``. A token has ``num_gates`` numbers more."""

    num_heads: int
    key_dim: int
    value_dim: int
    width: int
    channels: int
    num_gates: int

    @property
    def num_bytes(self) -> int:
        num_numbers = self.num_heads * self.key_dim * self.value_dim + self.width * self.channels
        return FLOAT_BYTES * num_numbers

    @property
    def draft_bytes(self) -> int:
        """The bytes of the kept inputs of a draft."""
        return FLOAT_BYTES * (self.channels + self.num_gates)


class StatePool:
    """The states of ``specs``, one for each layer with a state: of all slots, then copies.
    ``layers`` is empty for a model without states."""

    def __init__(
        self, specs: Sequence[StateSpec], capacity: Capacity, device: torch.device
    ) -> None:
        num_slots, most_drafts = capacity.max_num_seqs, capacity.num_speculative_tokens
        num_states = num_slots + (capacity.num_states or 0)
        self.layers = [
            LayerStates(
                _zeros((num_states, each.num_heads, each.key_dim, each.value_dim), device),
                _zeros((num_states, each.width, each.channels), device),
                _zeros((num_slots, most_drafts, each.channels + each.num_gates), device),
            )
            for each in specs
        ]
        self._first_copy = num_slots
        self._interval = copy_interval(capacity.block_size)
        # Ids that a state has seen. Negative: the ids of a state that the slot awaits.
        self.positions = np.zeros(num_states, np.int64)
        self._copies = np.full(num_slots, NO_COPY)

    def apply(self, plan: StepPlan) -> None:
        """Begins the states of admitted sequences. Raises ValueError for a copy of other ids."""
        if not self.layers:
            return
        for keep in plan.keeps:
            self._copies[keep.slot] = self._place(keep.to_state)
        for row in plan.admit:
            self._begin(row)

    def rows(
        self, slots: np.ndarray, starts: np.ndarray, num_tokens: np.ndarray, num_drafts: np.ndarray
    ) -> StateRows | None:
        """The states of the rows of a step, each [R] int64; ``starts`` are the positions of their
        first tokens. None for a model without states. Counts the tokens at once, so the step must
        run."""
        if not self.layers:
            return None
        before, ends = self.positions[slots], starts + num_tokens - num_drafts
        if (before < 0).any():
            raise ValueError(f"the state of slot {slots[before.argmin()]} was not loaded")
        rows = StateRows(
            starts=np.concatenate([[0], np.cumsum(num_tokens)]),
            num_drafts=num_drafts,
            states=slots,
            positions=before,
            num_kept=np.maximum(starts - before, 0),
            num_seen=np.maximum(before - starts, 0),
            copies=self._copies[slots],
            interval=self._interval,
        )
        self._note(slots, ends)
        return rows

    def note_more(self, slots: np.ndarray, num_tokens: int) -> None:
        """Notes that the same rows have run for ``num_tokens`` more steps of one token each."""
        if self.layers:
            self._note(slots, self.positions[slots] + num_tokens)

    def _note(self, slots: np.ndarray, ends: np.ndarray) -> None:
        copied = ends // self._interval * self._interval
        is_copied = (copied > self.positions[slots]) & (self._copies[slots] != NO_COPY)
        self.positions[self._copies[slots[is_copied]]] = copied[is_copied]
        self.positions[slots] = ends

    def _begin(self, row: Admit) -> None:
        self._copies[row.slot] = self._place(row.to_state)
        self.positions[row.slot] = row.num_cached
        source = self._place(row.from_state)
        num_seen = 0 if source == NO_COPY else int(self.positions[source])
        if num_seen != row.num_cached and source == self._copies[row.slot] != NO_COPY:
            self.positions[row.slot] = -row.num_cached
        elif num_seen != row.num_cached:
            raise ValueError(
                f"slot {row.slot} begins with {row.num_cached} ids; state {row.from_state} is of"
                f" {num_seen}"
            )
        for layer in self.layers:
            for states in (layer.matrices, layer.columns):
                states[row.slot] = 0 if source == NO_COPY else states[source]

    def _place(self, copy: int | None) -> int:
        return NO_COPY if copy is None else self._first_copy + copy


def _zeros(shape: tuple[int, ...], device: torch.device) -> Tensor:
    if device.type == "cpu":
        return huge_zeros(FLOAT_BYTES * math.prod(shape)).view(torch.float32).view(shape)
    return torch.zeros(shape, dtype=torch.float32, device=device)
