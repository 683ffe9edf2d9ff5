"""Experts (arXiv 1701.06538): of many feed-forward networks each token takes a few."""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from kernels.codes import Codes
from kernels.route import Routing
from services.worker.layers.gated import GatedProducts
from services.worker.layers.weights import empty_parameter


class Scores(nn.Module):
    """[T, hidden] → [T, outputs] in float32, whatever the model's type is. Its weight is never in
    codes."""

    def __init__(self, hidden_size: int, outputs: int) -> None:
        super().__init__()
        self.weight = empty_parameter(outputs, hidden_size, dtype=torch.float32)


class Router(Scores):
    """Gives a token's logit of each expert, by which ``routing`` chooses some.

    With a correction, it has numbers that are added to the experts' scores for the choice alone.
    """

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        routing: Routing,
        *,
        has_bias: bool = False,
        has_correction: bool = False,
    ) -> None:
        super().__init__(hidden_size, num_experts)
        self.num_experts, self.routing = num_experts, routing
        self.bias = self._numbers() if has_bias else None
        self.e_score_correction_bias = self._numbers() if has_correction else None

    def _numbers(self) -> nn.Parameter:
        return empty_parameter(self.num_experts, dtype=torch.float32)


class Stacks(NamedTuple):
    """Weights of all experts, each in one."""

    gate_up: Tensor | Codes  # [E, 2 inner, hidden]
    down: Tensor | Codes  # [E, hidden, inner]


class Experts(nn.Module):
    """Networks of one size and the router that chooses from them, named as in checkpoints.

    ``stacks`` are their weights as kernels of GPUs read them, where there are such; each network
    has a part of them then.
    """

    def __init__(self, gate: Router, experts: Iterable[GatedProducts]) -> None:
        super().__init__()
        self.gate = gate
        self.experts = nn.ModuleList(experts)
        self.stacks: Stacks | None = None

    @property
    def products(self) -> list[GatedProducts]:
        return [each for each in self.experts if isinstance(each, GatedProducts)]
