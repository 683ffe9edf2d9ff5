"""Parameters of the choice of experts."""

from typing import Literal, NamedTuple, get_args

Score = Literal["softmax", "sigmoid", "softmax_of_chosen"]


class Routing(NamedTuple):
    """Chooses ``num_chosen`` experts by their scores and computes their weights.

    ``score``: the activation of a logit: softmax over all experts, sigmoid, or softmax over the
    chosen experts (which are then chosen by their logits). ``num_groups``: consecutive experts form
    this many groups. Experts are chosen from the ``num_kept_groups`` groups whose ``group_best``
    best experts have the largest sum. ``min_sum``: weights are divided by their sum, or by
    ``min_sum`` if larger; None: not divided. ``factor``: a final factor on the weights.
    """

    num_chosen: int
    score: Score = "softmax"
    num_groups: int = 1
    num_kept_groups: int = 1
    group_best: int = 1
    min_sum: float | None = None
    factor: float = 1.0

    def check(self, num_experts: int) -> None:
        """Raises ValueError, naming the field, if the options do not fit ``num_experts``."""
        if self.score not in get_args(Score):
            raise ValueError(f"route: score {self.score!r} is not one of {get_args(Score)}")
        if num_experts % self.num_groups or not 1 <= self.num_kept_groups <= self.num_groups:
            raise ValueError(
                f"route: {self.num_kept_groups} of {self.num_groups} groups of {num_experts}"
                " experts: groups must be equal, and at least one kept"
            )
        group_size = num_experts // self.num_groups
        if self.group_best not in (1, 2) or self.group_best > group_size:
            raise ValueError(
                f"route: a group counts by its best or its two best experts, not by"
                f" {self.group_best} of {group_size}"
            )
        if not 1 <= self.num_chosen <= group_size * self.num_kept_groups:
            raise ValueError(
                f"route: num_chosen is {self.num_chosen}, which must be 1 to"
                f" {group_size * self.num_kept_groups}, the experts of kept groups"
            )
