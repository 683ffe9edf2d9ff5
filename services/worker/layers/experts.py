"""Experts (arXiv 1701.06538): of many feed-forward networks each token takes a few."""

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from kernels.codes import Codes
from kernels.experts import Biases
from kernels.route import Routed, Routing, expert_logits, route
from kernels.silu_mul import Act, Clamp
from services.worker.layers.gated import GatedProducts
from services.worker.layers.weights import adjacent, empty_parameter, stack_of


class Scores(nn.Module):
    """[T, hidden] → [T, outputs] in float32, independent of the model's dtype. Its weight is never
    quantized."""

    def __init__(self, hidden_size: int, outputs: int) -> None:
        super().__init__()
        self.weight = empty_parameter(outputs, hidden_size, dtype=torch.float32)


class Router(Scores):
    """Gives a token's logit of each expert, by which ``routing`` chooses some.

    With a correction, it has numbers that are added to the experts' scores for the choice alone.
    A subclass may have ``factors`` of the weights.
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
        self.factors: nn.Parameter | None = None

    def choose(self, x: Tensor, add: Callable[[Tensor], None]) -> Routed:
        """``add`` may change the logits, in place."""
        add(logits := expert_logits(x, self.weight, self.bias))
        return route(logits, self.routing, self.e_score_correction_bias)

    def _numbers(self) -> nn.Parameter:
        return empty_parameter(self.num_experts, dtype=torch.float32)


class Stacks(NamedTuple):
    """Weights of all experts, each in one, and their biases."""

    gate_up: Tensor | Codes  # [E, 2 inner, hidden], or without gates [E, inner, hidden]
    down: Tensor | Codes  # [E, hidden, inner]
    biases: Biases | None


class Experts(nn.Module):
    """Networks of one size and the router that chooses from them, named as in checkpoints.

    ``products`` are the experts of this rank, whole or in part: adjacent ones, from expert
    ``first`` on; the others are empty. If it ``is_partial``, the outputs must be added up over all
    ranks. ``stacks`` are the weights in the layout of GPU kernels, if there are any (see
    ``stack_experts``); each network then has a part of them. ``counts``, if there are any, grow by
    the tokens that go to each expert. Experts that are ``of_images``, or are not, take no other
    tokens (see ``Ops.experts``).
    """

    def __init__(
        self, gate: Router, experts: Iterable[GatedProducts], act: Act | Clamp = "silu"
    ) -> None:
        super().__init__()
        self.gate = gate
        networks = list(experts)
        self.experts = nn.ModuleList(networks)
        self.products = [each for each in networks if not each.down_proj.is_empty]
        self.first = networks.index(self.products[0])
        self.is_partial = any(each.down_proj.is_partial for each in networks)
        self.act = act
        self.stacks: Stacks | None = None
        self.counts: Tensor | None = None  # [experts] int64
        self.of_images: bool | None = None  # None: all tokens take them

    def find_stacks(self) -> None:
        """Makes ``stacks`` views of the ``products``' weights, which are adjacent in memory."""
        first, num = self.products[0], len(self.products)
        gate_up, down = first.gate_up_proj, first.down_proj
        biases = None
        if gate_up.bias is not None:
            down_bias = down.bias if down.is_first else None
            added = None if down_bias is None else adjacent(down_bias, num)
            biases = Biases(adjacent(gate_up.bias, num), added)
        self.stacks = Stacks(stack_of(gate_up.weight, num), stack_of(down.weight, num), biases)


def biases_of(products: Iterable[GatedProducts]) -> Biases | None:
    """The biases of each network, if it has some. For networks shared by ranks, the first rank adds
    the downs' biases, because these are part of the weighted sum."""
    pairs = [(each.gate_up_proj, each.down_proj) for each in products]
    gate_up = [first.bias for first, _ in pairs if first.bias is not None]
    down = [second.bias for _, second in pairs if second.is_first and second.bias is not None]
    return Biases(gate_up, down or None) if gate_up else None


def has_experts(model: nn.Module) -> bool:
    """True if a layer on this rank has experts."""
    return any(isinstance(module, Experts) for module in model.modules())
