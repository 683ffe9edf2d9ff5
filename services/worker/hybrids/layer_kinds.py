"""The kinds of a hybrid's layers, as its config lists them, and attention without rotations."""

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from services.worker.config.frequencies import Rope

ATTENTION, STATEFUL = "full_attention", "linear_attention"


def kind_problems(
    kinds: Sequence[str],
    num_layers: int,
    known: Sequence[str] = (ATTENTION, STATEFUL),
    name: str = "layer_types",
) -> list[str]:
    """``name`` is the config's for the list."""
    problems, counts = [], Counter(kinds)
    if counts.total() != num_layers:
        problems.append(f"{name} has {counts.total()} entries; num_hidden_layers is {num_layers}")
    if unknown := counts.keys() - {*known}:
        problems.append(
            f"{name} {', '.join(sorted(unknown))} is not supported; only"
            f" {', '.join(known[:-1])} and {known[-1]} are"
        )
    if not counts[ATTENTION]:
        problems.append(f"no layer is {ATTENTION}: one is needed")
    return problems


class NoRope(Rope, frozen=True, kw_only=True):
    """Nothing turns."""

    rope_theta: float = 2.0

    def frequencies(self, head_dim: int, length: int) -> Tensor:
        return torch.zeros(head_dim // 2)
