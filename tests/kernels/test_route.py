"""Routing against the reference."""

from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.dispatch import runs_triton
from kernels.route import Routing, expert_logits, reference, route

# Routing and number of experts of published models.
FAMILIES: dict[str, tuple[int, Routing]] = {
    "mixtral": (8, Routing(2, min_sum=0.0)),
    "qwen3": (128, Routing(8, min_sum=0.0)),
    "qwen2": (60, Routing(4)),
    "deepseek-v2": (160, Routing(6, num_groups=8, num_kept_groups=3, factor=16.0)),
    "deepseek-v3": (256, Routing(8, "sigmoid", 8, 4, 2, 1e-20, 2.5)),
    "glm-4.5": (160, Routing(8, "sigmoid", group_best=2, min_sum=1e-20, factor=2.5)),
    "ernie-4.5": (64, Routing(6, min_sum=1e-12)),
    "gpt-oss": (32, Routing(4, "softmax_of_chosen")),
}
routings = pytest.mark.parametrize(("num_experts", "routing"), FAMILIES.values(), ids=FAMILIES)
biases = pytest.mark.parametrize("has_bias", [False, True])


def assert_routed(logits: Tensor, routing: Routing, bias: Tensor | None = None) -> None:
    found = route(logits, routing, bias)
    chosen, weights = reference.route(logits, routing, bias)
    assert found.chosen.dtype == torch.int32
    assert found.chosen.tolist() == chosen
    assert found.weights.dtype == torch.float32
    torch.testing.assert_close(found.weights.cpu().double(), weights, atol=1e-7, rtol=1e-5)


@routings
@biases
@pytest.mark.parametrize("num_tokens", [0, 1, 19])
def test_each_token_goes_to_its_best_experts(
    num_experts: int, routing: Routing, num_tokens: int, has_bias: bool, device: torch.device
) -> None:
    logits = 3 * torch.randn(num_tokens, num_experts, device=device)
    bias = torch.randn(num_experts, device=device) if has_bias else None
    assert_routed(logits, routing, bias)


@routings
@biases
def test_of_equal_experts_the_first_is_chosen(
    num_experts: int, routing: Routing, has_bias: bool, device: torch.device
) -> None:
    """Also the first of equal groups."""
    logits = torch.randint(0, 3, (12, num_experts), device=device).float()
    logits[0], logits[1] = 0, -0.0
    logits[1, ::2] = 0
    bias = torch.zeros(num_experts, device=device) if has_bias else None
    assert_routed(logits, routing, bias)


def test_a_bias_changes_the_choice_alone(device: torch.device) -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]], device=device)
    bias = torch.tensor([0.0, 0.0, 0.0, 1.0], device=device)
    found = route(logits, Routing(2, "sigmoid"), bias)
    assert found.chosen.tolist() == [[3, 0]]
    torch.testing.assert_close(found.weights, logits.sigmoid()[:, [3, 0]])


def test_a_small_sum_does_not_make_large_weights(device: torch.device) -> None:
    logits = torch.full((1, 4), -20.0, device=device)
    for min_sum in (1e-20, 0.5):
        assert_routed(logits, Routing(2, "sigmoid", min_sum=min_sum))
    logits.fill_(-1e4)
    weights = route(logits, Routing(2, "sigmoid", min_sum=1e-20)).weights
    assert weights.tolist() == [[0, 0]]


def test_a_tokens_experts_are_the_same_whatever_is_beside_it(device: torch.device) -> None:
    num_experts, routing = FAMILIES["deepseek-v3"]
    logits = torch.randn(33, num_experts, device=device)
    many = route(logits, routing)
    for token in (0, 7, 32):
        alone = route(logits[token : token + 1], routing)
        assert torch.equal(alone.chosen[0], many.chosen[token])
        assert torch.equal(alone.weights[0], many.weights[token])


def test_nan_stays_with_its_token_and_chooses_experts_that_exist(device: torch.device) -> None:
    for num_experts, routing in FAMILIES.values():
        logits = torch.randn(3, num_experts, device=device)
        logits[1, 5] = torch.nan
        found = route(logits, routing)
        assert set(found.chosen.flatten().tolist()) <= set(range(num_experts))
        assert found.weights[[0, 2]].isfinite().all()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"num_chosen": 0}, "num_chosen is 0, which must be 1 to 12"),
        ({"num_chosen": 13}, "num_chosen is 13, which must be 1 to 12"),
        ({"num_chosen": 4, "num_groups": 4}, "num_chosen is 4, which must be 1 to 3"),
        ({"num_groups": 5}, "1 of 5 groups of 12 experts: groups must be equal"),
        ({"num_groups": 2, "num_kept_groups": 3}, "3 of 2 groups of 12 experts"),
        ({"num_groups": 12, "group_best": 2}, "not by 2 of 1"),
        ({"group_best": 3}, "not by 3 of 12"),
        ({"score": "tanh"}, "score 'tanh' is not one of"),
    ],
)
def test_impossible_choices_are_errors(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        route(torch.zeros(1, 12), Routing(**{"num_chosen": 2, **given}))


def test_logits_that_were_rounded_are_an_error() -> None:
    with pytest.raises(ValueError, match="must be float32"):
        route(torch.zeros(1, 12, dtype=torch.bfloat16), Routing(2))
    with pytest.raises(ValueError, match="must be float32"):
        route(torch.zeros(1, 12), Routing(2), torch.zeros(12).half())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("num_experts", "size"), [(8, 1100), (60, 72)])
def test_logits_of_experts_are_exact_and_stand_alone(
    num_experts: int, size: int, has_bias: bool, dtype: torch.dtype, device: torch.device
) -> None:
    """On a CPU the GEMM of a step may round differently from that of one token."""
    x, weight = (torch.randn(num, size, device=device) for num in (11, num_experts))
    bias = torch.randn(num_experts, device=device) if has_bias else None
    x = x.to(dtype)
    found = expert_logits(x, weight, bias)
    expected = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    torch.testing.assert_close(found.double(), expected, atol=1e-4, rtol=1e-5)
    if runs_triton(x):
        for token in range(len(x)):
            alone = expert_logits(x[token : token + 1], weight, bias)
            assert torch.equal(alone[0], found[token])
