"""Reference of ``route``, one token after another."""

from math import exp, inf

import torch
from torch import Tensor

from kernels.route.options import Routing


def route(
    logits: Tensor, routing: Routing, bias: Tensor | None = None
) -> tuple[list[list[int]], Tensor]:
    """The chosen experts, and their weights [T, k] in float64."""
    biases = [0.0] * logits.shape[1] if bias is None else bias.double().tolist()
    routed = [_route(row, routing, biases) for row in logits.double().tolist()]
    weights = torch.tensor([each for _, each in routed], dtype=torch.float64)
    return [chosen for chosen, _ in routed], weights.view(-1, routing.num_chosen)


def _route(
    logits: list[float], routing: Routing, biases: list[float]
) -> tuple[list[int], list[float]]:
    scores = logits
    if routing.score == "softmax":
        scores = _softmax(logits)
    elif routing.score == "sigmoid":
        scores = [1 / (1 + exp(-logit)) for logit in logits]
    ranked = [score + bias for score, bias in zip(scores, biases, strict=True)]
    group_size = len(logits) // routing.num_groups
    groups = [ranked[i : i + group_size] for i in range(0, len(logits), group_size)]
    best = [sum(sorted(group)[-routing.group_best :]) for group in groups]
    kept = _best_first(best)[: routing.num_kept_groups]
    ranked = [each if i // group_size in kept else -inf for i, each in enumerate(ranked)]
    chosen = _best_first(ranked)[: routing.num_chosen]
    weights = [scores[expert] for expert in chosen]
    if routing.score == "softmax_of_chosen":
        weights = _softmax(weights)
    if routing.min_sum is not None:
        total = max(sum(weights), routing.min_sum)
        weights = [weight / total for weight in weights]
    return chosen, [weight * routing.factor for weight in weights]


def _softmax(logits: list[float]) -> list[float]:
    powers = [exp(logit - max(logits)) for logit in logits]
    return [power / sum(powers) for power in powers]


def _best_first(each: list[float]) -> list[int]:
    return sorted(range(len(each)), key=lambda i: (-each[i], i))
