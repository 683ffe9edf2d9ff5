"""Biases of the experts' GEMMs."""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor


class Biases(NamedTuple):
    """Stacked, or one per expert; ``down`` may be None."""

    gate_up: Tensor | Sequence[Tensor]  # [E, 2 I], or without gates [E, I]
    down: Tensor | Sequence[Tensor] | None  # [E, H]
