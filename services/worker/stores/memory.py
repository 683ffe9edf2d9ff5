"""The bytes that a store copies, and the sizes of its parts."""

from collections.abc import Sequence
from itertools import chain

import numpy as np
from torch import Tensor

from kernels.delta import LayerStates
from services.worker.block_layout import BlockMemory, facts_of_layer
from services.worker.models.decoder import DecoderLM
from shared.wire.messages import EVERY_LAYER


class StateMemory(BlockMemory):
    """The memory of each copy of a state, behind the states of ``num_slots``. ``positions`` as in
    ``StatePool``."""

    def __init__(
        self, layers: Sequence[LayerStates], positions: np.ndarray, num_slots: int
    ) -> None:
        super().__init__(chain.from_iterable(map(_of_copies, layers)))
        self._positions = positions
        self._num_slots = num_slots

    def pieces(self, block: int) -> Sequence[memoryview]:
        return super().pieces(self._num_slots + block)

    def clear(self, block: int) -> None:
        super().clear(self._num_slots + block)

    def begin(self, slot: int, copy: int, *, is_lost: bool) -> None:
        """Makes the copy that a slot was admitted with its state. The slot has no step with a lost
        one."""
        source, num = self._num_slots + copy, abs(self._positions[slot])
        self._positions[[slot, source]] = (-num, 0) if is_lost else num
        for rows in self._rows:
            rows[slot] = rows[source]


def facts_of_groups(model: DecoderLM) -> list[object]:
    """The windows of the groups of layers, and the group of each layer: layers of different groups
    use the same memory. Empty for one group with all layers."""
    if model.groups == EVERY_LAYER:
        return []
    windows = [each.window for each in model.groups]
    return [windows, [[each.number, each.group] for each in model.cached_layers()]]


def facts_of_states(layers: Sequence[LayerStates]) -> list[object]:
    """The layout of a state."""
    return [facts_of_layer(_of_copies(layer)) for layer in layers]


def _of_copies(layer: LayerStates) -> tuple[Tensor, Tensor]:
    return layer.matrices, layer.columns


def split(
    num_bytes: int, block_bytes: int, state_bytes: int, blocks_between: int
) -> tuple[int, int]:
    """Counts the places for blocks and for states of a store with ``num_bytes``. States get at most
    half, as in the cache, and one place for the ``blocks_between`` two of a sequence."""
    if not state_bytes:
        return num_bytes // block_bytes, 0
    of_each = num_bytes // (blocks_between * block_bytes + state_bytes)
    num_states = min(num_bytes // 2 // state_bytes, of_each)
    return (num_bytes - num_states * state_bytes) // block_bytes, num_states
