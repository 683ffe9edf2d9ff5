"""How a token's experts are chosen."""

from typing import Literal, NamedTuple, get_args

Score = Literal["softmax", "sigmoid", "softmax_of_chosen"]


class Routing(NamedTuple):
    """``num_chosen`` of a layer's experts, by their scores, and the weights of what they give.

    ``score``: of an expert's logit, among all experts, alone, or among the chosen ones; those of
    the last kind are chosen by their logits.
    ``num_groups``: experts are that many groups of neighbours, of which only ``num_kept_groups``
    are chosen from: those whose ``group_best`` best experts have the largest sum.
    ``min_sum``: weights are scores divided by their sum, or by this where it is less. None: they
    are not divided. ``factor``: weights are multiplied by it at last.
    """

    num_chosen: int
    score: Score = "softmax"
    num_groups: int = 1
    num_kept_groups: int = 1
    group_best: int = 1
    min_sum: float | None = None
    factor: float = 1.0

    def check(self, num_experts: int) -> None:
        """Raises ValueError, which says what does not go with ``num_experts``."""
        if self.score not in get_args(Score):
            raise ValueError(f"route: score {self.score!r} is none of {get_args(Score)}")
        if num_experts % self.num_groups or not 1 <= self.num_kept_groups <= self.num_groups:
            raise ValueError(
                f"route: {self.num_kept_groups} of {self.num_groups} groups of {num_experts}"
                " experts: groups must be equal, and one of them kept at least"
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
