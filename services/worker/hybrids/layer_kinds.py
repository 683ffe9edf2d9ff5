"""The kinds of a model's layers, as its config lists them."""

from collections import Counter
from collections.abc import Sequence

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
