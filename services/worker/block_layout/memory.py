"""The memory of KV blocks and states, one by one."""

from collections.abc import Iterable, Sequence
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from kernels.delta import LayerStates
from services.worker.block_layout.layout import parts_of


class BlockMemory:
    """The memory of each block, or state, in ``tensors`` [blocks, ...], one by one."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._rows = [
            tensor.flatten(1).view(torch.uint8).numpy() for tensor in tensors if tensor.numel()
        ]

    @property
    def num_bytes(self) -> int:
        """Of a block."""
        return sum(rows.shape[1] for rows in self._rows)

    @property
    def total(self) -> int:
        return sum(rows.nbytes for rows in self._rows)

    def pieces(self, block: int) -> Sequence[memoryview]:
        return [rows[block].data for rows in self._rows]

    def clear(self, block: int) -> None:
        for rows in self._rows:
            rows[block] = 0


class StateMemory(BlockMemory):
    """The memory of each copy of a state, behind the states of ``num_slots``. ``positions`` as in
    ``StatePool``."""

    def __init__(
        self, layers: Sequence[LayerStates], positions: np.ndarray, num_slots: int
    ) -> None:
        super().__init__(chain.from_iterable(map(parts_of, layers)))
        self._positions = positions
        self._num_slots = num_slots

    def pieces(self, block: int) -> Sequence[memoryview]:
        return super().pieces(self._num_slots + block)

    def clear(self, block: int) -> None:
        super().clear(self._num_slots + block)

    def note(self, copy: int, num_tokens: int) -> None:
        """The copy is of a state that has seen ``num_tokens``."""
        self._positions[self._num_slots + copy] = num_tokens

    def begin(self, slot: int, copy: int, *, is_lost: bool) -> None:
        """Makes the copy that a slot was admitted with its state. The slot has no step with a lost
        one."""
        source, num = self._num_slots + copy, abs(self._positions[slot])
        self._positions[[slot, source]] = (-num, 0) if is_lost else num
        for rows in self._rows:
            rows[slot] = rows[source]
