"""Chooses the experts of each token and their weights."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from kernels.dispatch import runs_triton
from kernels.linear import FEW_TOKENS
from kernels.route.options import Routing, Score

__all__ = ["Routed", "Routing", "Score", "expert_logits", "route"]


class Routed(NamedTuple):
    chosen: Tensor  # [T, k] int32, best first; ties by lowest index
    weights: Tensor  # [T, k] float32


def expert_logits(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [T, H] @ weight.T of [E, H] + bias [E] → [T, E], all in float32.

    A token's logits have the same bits for every T up to ``FEW_TOKENS`` on a GPU; cuBLAS serves
    more tokens.
    """
    if runs_triton(x) and len(x) <= FEW_TOKENS:
        from kernels.route.triton import launch_logits

        return launch_logits(x, weight, bias)
    return functional.linear(x.float(), weight.float(), bias)


def route(logits: Tensor, routing: Routing, bias: Tensor | None = None) -> Routed:
    """logits [T, E] float32 → k = ``routing.num_chosen`` experts for each token.

    ``bias`` [E] float32 is added to the scores for the choice only, not to the weights
    (DeepSeek-V3, arXiv 2412.19437, 2.1.2). Raises ValueError if ``routing`` does not fit E experts.
    """
    routing.check(logits.shape[1])
    if logits.dtype != torch.float32 or (bias is not None and bias.dtype != torch.float32):
        raise ValueError("route: logits and bias must be float32")
    if runs_triton(logits):
        from kernels.route.triton import launch

        return Routed(*launch(logits, routing, bias))
    scores = _scores(logits, routing)
    ranked = _kept(scores if bias is None else scores + bias, routing)
    chosen = _best_first(ranked)[:, : routing.num_chosen]
    weights = scores.gather(1, chosen)
    if routing.score == "softmax_of_chosen":
        weights = weights.softmax(1)
    if routing.min_sum is not None:
        weights = weights / weights.sum(1, keepdim=True).clamp_min(routing.min_sum)
    return Routed(chosen.int(), weights * routing.factor)


def _scores(logits: Tensor, routing: Routing) -> Tensor:
    match routing.score:
        case "softmax":
            return logits.softmax(1)
        case "sigmoid":
            return logits.sigmoid()
        case "softmax_of_chosen":
            return logits


def _kept(ranked: Tensor, routing: Routing) -> Tensor:
    """-inf for experts outside the kept groups."""
    if routing.num_kept_groups == routing.num_groups:
        return ranked
    groups: Tensor = ranked.unflatten(1, (routing.num_groups, -1))  # [T, groups, experts]
    best = groups.topk(routing.group_best, sorted=False).values.sum(2)
    is_left = torch.ones_like(best, dtype=torch.bool)
    is_left.scatter_(1, _best_first(best)[:, : routing.num_kept_groups], False)
    kept: Tensor = groups.masked_fill(is_left[:, :, None], -torch.inf).flatten(1)
    return kept


def _best_first(each: Tensor) -> Tensor:
    """Descending, ties by lowest index, unlike ``topk``."""
    order: Tensor = each.sort(dim=1, descending=True, stable=True).indices
    return order
