"""Biases of experts' products."""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor


class Biases(NamedTuple):
    """Of all experts in one, or of each. Without those of downs none is added to what they give."""

    gate_up: Tensor | Sequence[Tensor]  # [E, 2 I]
    down: Tensor | Sequence[Tensor] | None  # [E, H]
