"""A layer's experts under random choice, compared with torch's grouped GEMMs; and the choice
itself.

Only used experts' weights must be read. Each run uses other experts of a layer.
"""

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.gpu.rows import Case, num_copies
from benchmarks.gpu.shapes import Mixture
from benchmarks.gpu.suite import Suite
from benchmarks.gpu.timing import Run
from kernels.codes import Codes
from kernels.experts import experts
from kernels.route import Routing, expert_logits, route
from kernels.silu_mul import silu_mul
from services.worker.weights.online import ONLINE, Quantization

FORMS: tuple[Quantization, ...] = ("none", "fp8", "wint4")
SEED = 0


class Weights(NamedTuple):
    gate_up: Tensor | Codes  # [E, 2 I, H]
    down: Tensor | Codes  # [E, H, I]


def cases(suite: Suite) -> Iterator[Case]:
    """Few tokens first, in each form, then a prompt's."""
    for name, mixture in suite.mixtures.items():
        nums = (*suite.nums_tokens, suite.chunks[0])
        for num_tokens in nums:
            forms = FORMS if num_tokens in (nums[0], nums[-1]) else FORMS[:1]
            for form in forms:
                yield _case(suite, name, mixture, form, num_tokens)
            yield _scores_case(suite, name, mixture, num_tokens)
            yield _routing_case(suite, name, mixture, num_tokens)


def _case(suite: Suite, name: str, mixture: Mixture, form: Quantization, num_tokens: int) -> Case:
    shape = f"{name}, {num_tokens} tokens"
    num_pairs = num_tokens * mixture.num_chosen
    num_numbers = 3 * mixture.hidden_size * mixture.inner_size
    each_bytes = _num_bytes(_weights(suite, mixture._replace(num_experts=1), form))
    draws = _draws(suite, mixture, num_tokens, each_bytes)
    num_hit = sum(len(draw.unique()) for draw in draws) / len(draws)
    make = partial(_runs, suite, mixture, form, draws)
    operator, peer = ("experts", "grouped_mm") if form == "none" else (f"experts, {form}", "")
    num_bytes, num_flops = int(num_hit * each_bytes), 2 * num_pairs * num_numbers
    return Case(operator, shape, make, num_bytes, num_flops, peer)


def _draws(suite: Suite, mixture: Mixture, num_tokens: int, each_bytes: int) -> list[Tensor]:
    """[T, k] each, enough that no weights of a run remain in the caches."""
    random = torch.Generator().manual_seed(SEED)
    shape = num_tokens, mixture.num_experts
    copies = num_copies(suite, each_bytes * min(mixture.num_experts, shape[0] * mixture.num_chosen))
    return [
        torch.rand(shape, generator=random).topk(mixture.num_chosen).indices.int()
        for _ in range(copies)
    ]


def _runs(
    suite: Suite, mixture: Mixture, form: Quantization, draws: list[Tensor]
) -> tuple[list[Run], list[Run]]:
    weights = _weights(suite, mixture, form)
    ours: list[Run] = []
    theirs: list[Run] = []
    for draw in draws:
        chosen = draw.to(suite.device)
        x, residual = (_random(suite, len(chosen), mixture.hidden_size) for _ in range(2))
        shares = torch.rand(chosen.shape, device=suite.device).softmax(1)
        ours.append(partial(experts, x, chosen, shares, *weights, residual=residual))
        if isinstance(weights.gate_up, Tensor) and isinstance(weights.down, Tensor):
            dense = weights.gate_up, weights.down
            theirs.append(partial(_grouped, x, chosen, shares, *dense, residual))
    return ours, theirs


def _grouped(
    x: Tensor, chosen: Tensor, shares: Tensor, gate_up: Tensor, down: Tensor, residual: Tensor
) -> Tensor:
    """The computation of transformers' grouped path."""
    num_chosen = chosen.shape[1]
    by_expert = chosen.flatten().sort()
    counts = torch.histc(by_expert.values.float(), len(down), 0, len(down) - 1)
    ends = counts.cumsum(0).int()
    pairs = by_expert.indices
    both = functional.grouped_mm(x[pairs // num_chosen], gate_up.transpose(1, 2), offs=ends)
    parts = functional.grouped_mm(silu_mul(both), down.transpose(1, 2), offs=ends)
    parts = (parts * shares.flatten()[pairs, None])[pairs.argsort()]
    return (residual + parts.view(*chosen.shape, -1).sum(1)).to(x.dtype)


def _scores_case(suite: Suite, name: str, mixture: Mixture, num_tokens: int) -> Case:
    """The router's GEMV or GEMM, in float32."""
    num_bytes = 4 * mixture.hidden_size * mixture.num_experts

    def make() -> tuple[list[Run], list[Run]]:
        x = _random(suite, num_tokens, mixture.hidden_size)
        shape = num_copies(suite, num_bytes), mixture.num_experts, mixture.hidden_size
        weights = torch.randn(shape, device=suite.device)
        return [partial(expert_logits, x, each) for each in weights], []

    return Case("router", f"{name}, {num_tokens} tokens", make, num_bytes)


def _routing_case(suite: Suite, name: str, mixture: Mixture, num_tokens: int) -> Case:
    num_bytes = 4 * num_tokens * mixture.num_experts
    make = partial(_routings, suite, mixture, num_tokens)
    return Case("route", f"{name}, {num_tokens} tokens", make, num_bytes)


def _routings(suite: Suite, mixture: Mixture, num_tokens: int) -> tuple[list[Run], list[Run]]:
    logits = torch.randn(num_tokens, mixture.num_experts, device=suite.device)
    return [partial(route, logits, Routing(mixture.num_chosen, min_sum=0.0))], []


def _weights(suite: Suite, mixture: Mixture, form: Quantization) -> Weights:
    num, hidden, inner = mixture.num_experts, mixture.hidden_size, mixture.inner_size
    return Weights(*(_stack(suite, form, num, *shape) for shape in _shapes(hidden, inner)))


def _shapes(hidden: int, inner: int) -> tuple[tuple[int, int], tuple[int, int]]:
    return (2 * inner, hidden), (hidden, inner)


def _stack(
    suite: Suite, form: Quantization, num_experts: int, num_rows: int, size: int
) -> Tensor | Codes:
    """Quantized experts are copies of the first."""
    if form == "none":
        return _random(suite, num_experts, num_rows, size, std=0.02)
    codes = ONLINE[form](_random(suite, num_rows, size, std=0.02)).as_codes
    stacks = (each.repeat(num_experts, 1, 1) for each in (codes.codes, codes.scales))
    return codes._replace(codes=next(stacks), scales=next(stacks))


def _num_bytes(weights: Weights) -> int:
    each = [
        (weight.codes, weight.scales) if isinstance(weight, Codes) else (weight,)
        for weight in weights
    ]
    return sum(tensor.nbytes for tensors in each for tensor in tensors)


def _random(suite: Suite, *shape: int, std: float = 1.0) -> Tensor:
    return torch.empty(shape, dtype=suite.dtype, device=suite.device).normal_(0, std)
