"""Experts against their reference, and the reference against a plain loop."""

import math
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from kernels.codes import Codes
from kernels.experts import Biases, Clamp, blocks, experts, reference
from kernels.experts.blocks import MANY_TOKENS, VERY_MANY_TOKENS
from kernels.silu_mul import Act
from tests.kernels.coded import KINDS, random_codes
from tests.selection import every_pair

# Relative to the largest result. Gates times ups and each expert's output are rounded; in some
# paths gates, ups and dequantized weights are, too.
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2**-5, torch.float16: 2**-8}
DTYPES = [torch.float32, torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)]
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
kinds = pytest.mark.parametrize("kind", KINDS)


class Layer(NamedTuple):
    gate_up: Tensor | Codes  # [E, 2 I, H]
    down: Tensor | Codes  # [E, H, I]


class Tokens(NamedTuple):
    x: Tensor  # [T, H]
    chosen: Tensor  # [T, k]
    weights: Tensor  # [T, k]


def dense_layer(
    num_experts: int, hidden: int, inner: int, dtype: torch.dtype, device: torch.device
) -> Layer:
    gate_up = torch.randn(num_experts, 2 * inner, hidden, device=device) / hidden**0.5
    down = torch.randn(num_experts, hidden, inner, device=device) / inner**0.5
    return Layer(gate_up.to(dtype), down.to(dtype))


def coded_layer(
    kind: str,
    num_experts: int,
    hidden: int,
    inner: int,
    device: torch.device,
    *,
    zeros: bool = False,
    order: bool = False,
) -> Layer:
    def stack(num_rows: int, size: int, group: int | None) -> Codes:
        shape, each = (num_rows, size), range(num_experts)
        codes = [random_codes(kind, shape, group, zeros=zeros, order=order) for _ in each]
        return stacked(codes, size**-0.5, device)

    return Layer(stack(2 * inner, hidden, 32), stack(hidden, inner, None))


def stacked(each: list[Codes], scale: float, device: torch.device) -> Codes:
    tensors: dict[str, Any] = {
        name: torch.stack([getattr(one, name) for one in each]).to(device)
        for name in ("codes", "scales", "zeros", "order")
        if getattr(each[0], name) is not None
    }
    tensors["scales"] = tensors["scales"] * scale
    table = each[0].table
    return each[0]._replace(**tensors, table=None if table is None else table.to(device))


def tokens_of(
    num_tokens: int,
    num_experts: int,
    num_chosen: int,
    hidden: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Tokens:
    chosen = torch.rand(num_tokens, num_experts).topk(num_chosen).indices
    weights = torch.rand(num_tokens, num_chosen).softmax(1)
    x = torch.randn(num_tokens, hidden).to(dtype)
    return Tokens(x.to(device), chosen.int().to(device), weights.to(device))


def dense(each: Tensor | Codes) -> Tensor:
    if isinstance(each, Tensor):
        return each
    return torch.stack([each.expert(i).values(torch.float32) for i in range(each.shape[0])])


def assert_near(
    found: Tensor,
    tokens: Tokens,
    layer: Layer,
    residual: Tensor | None,
    biases: Biases | None = None,
    act: Act | Clamp = "silu",
) -> None:
    weights = dense(layer.gate_up), dense(layer.down)
    expected = reference.experts(*tokens, *weights, residual, biases, act)
    assert found.dtype == tokens.x.dtype
    atol = TOLERANCES[found.dtype] * float(expected.abs().max()) if len(expected) else 0.0
    torch.testing.assert_close(found.double(), expected, atol=atol, rtol=0.0)


def test_the_reference_is_the_plain_loop() -> None:
    device = torch.device("cpu")
    layer = dense_layer(3, 4, 2, torch.float32, device)
    x, chosen, weights = tokens_of(5, 3, 2, 4, torch.float32, device)
    assert isinstance(layer.gate_up, Tensor)
    assert isinstance(layer.down, Tensor)
    gate_up, down = layer.gate_up.tolist(), layer.down.tolist()
    expected = [[0.0] * 4 for _ in range(5)]
    for token in range(5):
        row = x[token].tolist()
        for expert, weight in zip(chosen[token].tolist(), weights[token].tolist(), strict=True):
            both = [sum(a * b for a, b in zip(line, row, strict=True)) for line in gate_up[expert]]
            inner = [
                gate / (1 + math.exp(-gate)) * up
                for gate, up in zip(both[:2], both[2:], strict=True)
            ]
            for i, line in enumerate(down[expert]):
                expected[token][i] += weight * sum(a * b for a, b in zip(line, inner, strict=True))
    found = reference.experts(x, chosen, weights, layer.gate_up, layer.down)
    torch.testing.assert_close(
        found, torch.tensor(expected, dtype=torch.float64), atol=1e-12, rtol=1e-12
    )


@dtypes
@pytest.mark.parametrize("has_residual", [False, True])
@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "num_chosen", "hidden", "inner"),
    [
        (0, 4, 2, 16, 16),
        (1, 4, 1, 16, 8),
        (3, 64, 8, 40, 24),
        (17, 8, 2, 136, 72),
        (70, 8, 8, 32, 16),
    ],
)
def test_each_token_has_the_sum_of_its_experts(
    num_tokens: int,
    num_experts: int,
    num_chosen: int,
    hidden: int,
    inner: int,
    has_residual: bool,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    layer = dense_layer(num_experts, hidden, inner, dtype, device)
    tokens = tokens_of(num_tokens, num_experts, num_chosen, hidden, dtype, device)
    residual = torch.randn_like(tokens.x) if has_residual else None
    found = experts(*tokens, *layer, residual=residual)
    assert found.shape == (num_tokens, hidden)
    assert_near(found, tokens, layer, residual)


@pytest.mark.parametrize("load", ["one expert", "the last two", "some"])
@pytest.mark.parametrize("num_tokens", [5, 16, 33])
def test_loads_may_be_uneven(num_tokens: int, load: str, device: torch.device) -> None:
    dtype = torch.float32
    layer = dense_layer(6, 32, 16, dtype, device)
    tokens = tokens_of(num_tokens, 6, 2, 32, dtype, device)
    if load == "one expert":
        chosen, weights = tokens.chosen[:, :1] * 0 + 3, tokens.weights[:, :1].contiguous()
        tokens = Tokens(tokens.x, chosen, weights)
    elif load == "the last two":
        tokens.chosen[:] = torch.tensor([5, 4], dtype=torch.int32)
    else:
        tokens.chosen[:] = torch.tensor([1, 4], dtype=torch.int32)
        tokens.chosen[0] = torch.tensor([4, 0], dtype=torch.int32)
    assert_near(experts(*tokens, *layer), tokens, layer, None)


@pytest.mark.parametrize("kind", ["dense", "int8"])
@pytest.mark.parametrize("num_tokens", [3, 70])
def test_some_of_the_experts_give_their_part_of_the_sum(
    kind: str, num_tokens: int, device: torch.device
) -> None:
    """The last one has no tokens. The biases of their downs belong to another rank."""
    layer = dense_layer(5, 96, 48, torch.float32, device)
    if kind != "dense":
        layer = coded_layer(kind, 5, 96, 48, device)
    x, chosen, weights = tokens_of(num_tokens, 4, 2, 96, torch.float32, device)
    biases = torch.randn(5, 96, device=device)
    for first, end in ((0, 2), (2, 4), (4, 5)):
        some = [part(each, first, end) for each in layer]
        own = Biases(biases[first:end], None)
        found = experts(x, chosen, weights, *some, biases=own, first=first)
        are_here = (chosen >= first) & (chosen < end)
        tokens = Tokens(x, chosen, weights * are_here)
        assert_near(found, tokens, layer, None, Biases(biases, None))


def part(each: Tensor | Codes, first: int, end: int) -> Tensor | Codes:
    """Of the experts from ``first`` to ``end``."""
    if isinstance(each, Tensor):
        return each[first:end]
    return each._replace(codes=each.codes[first:end], scales=each.scales[first:end])


@pytest.mark.parametrize(
    ("kind", "has_more", "num_tokens", "dtype"),
    every_pair(KINDS, [False, True], [1, 70], [*TOLERANCES]),
)
def test_weights_may_be_in_codes(
    kind: str, has_more: bool, num_tokens: int, dtype: torch.dtype, device: torch.device
) -> None:
    layer = coded_layer(kind, 5, 160, 48, device, zeros=has_more, order=has_more)
    tokens = tokens_of(num_tokens, 5, 2, 160, dtype, device)
    assert_near(experts(*tokens, *layer), tokens, layer, None)


@dtypes
def test_one_of_the_weights_may_be_in_codes(dtype: torch.dtype, device: torch.device) -> None:
    """Quantized weights have fewer pairs in a block than dense ones."""
    dense, coded = dense_layer(2, 64, 48, dtype, device), coded_layer("int8", 2, 64, 48, device)
    tokens = tokens_of(70, 2, 2, 64, dtype, device)
    for layer in (dense._replace(down=coded.down), coded._replace(down=dense.down)):
        assert_near(experts(*tokens, *layer), tokens, layer, None)


@dtypes
@pytest.mark.parametrize("kind", ["dense", "table"])
@pytest.mark.parametrize("num_tokens", [3, 70])
def test_experts_may_have_biases_and_a_clamp(
    kind: str, num_tokens: int, dtype: torch.dtype, device: torch.device
) -> None:
    """Like gpt-oss; a token has the same bits in every batch."""
    if kind == "dense":
        layer = dense_layer(5, 160, 48, dtype, device)
    else:
        layer = coded_layer(kind, 5, 160, 48, device)
    tokens = tokens_of(num_tokens, 5, 2, 160, dtype, device)
    given = [torch.randn(5, size, device=device).to(dtype) for size in (96, 160)]
    options: dict[str, Any] = {"biases": Biases(*given), "act": Clamp(1.702, 1.0)}
    found = experts(*tokens, *layer, **options)
    assert_near(found, tokens, layer, None, **options)
    alone = Tokens(*(each[2:3].contiguous() for each in tokens))
    assert torch.equal(experts(*alone, *layer, **options), found[2:3])


@dtypes
def test_experts_may_have_another_act(dtype: torch.dtype, device: torch.device) -> None:
    """Like Gemma 4."""
    layer = dense_layer(5, 160, 48, dtype, device)
    tokens = tokens_of(3, 5, 2, 160, dtype, device)
    found = experts(*tokens, *layer, act="gelu_tanh")
    assert_near(found, tokens, layer, None, act="gelu_tanh")


@dtypes
@pytest.mark.parametrize("kind", ["dense", "table"])
@pytest.mark.parametrize("num_tokens", [3, 70])
def test_experts_may_have_no_gates(
    kind: str, num_tokens: int, dtype: torch.dtype, device: torch.device
) -> None:
    """Like Nemotron 3; an inner size of half of the rows."""
    if kind == "dense":
        both = dense_layer(5, 160, 24, dtype, device)
        down = dense_layer(5, 160, 48, dtype, device).down
    else:
        both = coded_layer(kind, 5, 160, 24, device)
        down = coded_layer(kind, 5, 160, 48, device).down
    layer = both._replace(down=down)
    tokens = tokens_of(num_tokens, 5, 2, 160, dtype, device)
    biases = Biases(torch.randn(5, 48, device=device).to(dtype), None)
    found = experts(*tokens, *layer, biases=biases, act="relu2")
    assert_near(found, tokens, layer, None, biases, "relu2")
    alone = Tokens(*(each[2:3].contiguous() for each in tokens))
    assert torch.equal(experts(*alone, *layer, biases=biases, act="relu2"), found[2:3])


def test_each_expert_may_have_a_weight_of_its_own() -> None:
    """With torch's operators: each expert may have its own order, too."""
    device = torch.device("cpu")
    tokens = tokens_of(9, 3, 2, 64, torch.float32, device)
    gate_up = [random_codes("int8", (32, 64), 32, order=True) for _ in range(3)]
    down = torch.randn(3, 64, 16) / 4
    values = torch.stack([each.values(torch.float32) for each in gate_up])
    biases = Biases(list(torch.randn(3, 32)), list(torch.randn(3, 64)))
    found = experts(*tokens, gate_up, list(down), biases=biases)
    assert_near(found, tokens, Layer(values, down), None, biases)


@dtypes
@pytest.mark.parametrize("kind", ["dense", "int8", "counted"])
def test_a_tokens_result_is_the_same_bits_whatever_is_beside_it(
    kind: str, dtype: torch.dtype, device: torch.device
) -> None:
    if kind == "dense":
        layer = dense_layer(4, 96, 40, dtype, device)
    else:
        layer = coded_layer(kind, 4, 96, 48, device)
    tokens = tokens_of(70, 4, 2, 96, dtype, device)
    tokens.chosen[10:] = torch.tensor([2, 1], dtype=torch.int32, device=device)
    residual = torch.randn_like(tokens.x)
    many = experts(*tokens, *layer, residual=residual)
    for start, stop in ((0, 1), (9, 12), (69, 70), (5, 38)):
        part = slice(start, stop)
        few = Tokens(*(each[part].contiguous() for each in tokens))
        found = experts(*few, *layer, residual=residual[part].contiguous())
        assert torch.equal(found, many[part]), part


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["dense", *KINDS])
def test_in_sizes_of_models_bits_are_the_same_for_few_and_many(kind: str) -> None:
    device, dtype = torch.device("cuda"), torch.bfloat16
    if kind == "dense":
        layer = dense_layer(32, 2048, 768, dtype, device)
    else:
        layer = coded_layer(kind, 32, 2048, 768, device, zeros=True)
    tokens = tokens_of(VERY_MANY_TOKENS + 20, 32, 8, 2048, dtype, device)
    many = experts(*tokens, *layer)
    for num_tokens in (1, 8, 64, 65, MANY_TOKENS):
        few = Tokens(*(each[:num_tokens] for each in tokens))
        found = experts(*few, *layer)
        assert torch.equal(found, many[:num_tokens]), num_tokens
        assert_near(found, few, layer, None)


def test_a_long_prompt_has_the_bits_of_a_short_one(
    triton_device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks of 16, 64, 128 and 256 pairs, most of which are not full."""
    monkeypatch.setattr(blocks, "MANY_TOKENS", 100)
    monkeypatch.setattr(blocks, "VERY_MANY_TOKENS", 200)
    layer = dense_layer(3, 96, 40, torch.bfloat16, triton_device)
    tokens = tokens_of(210, 3, 2, 96, torch.bfloat16, triton_device)
    sizes, found = [], []
    for num_tokens in (60, 90, 190, 210):
        sizes.append(blocks.block_of(num_tokens, 2))
        part = Tokens(*(each[:num_tokens] for each in tokens))
        found.append(experts(*part, *layer)[:60])
    assert sizes == [16, 64, 128, 256]
    assert all(torch.equal(each, found[0]) for each in found[1:])


def test_nan_stays_with_its_token(device: torch.device) -> None:
    layer = dense_layer(3, 32, 16, torch.float32, device)
    tokens = tokens_of(6, 3, 2, 32, torch.float32, device)
    tokens.x[2, 7] = torch.nan
    found = experts(*tokens, *layer)
    assert found[2].isnan().all()
    assert found[[0, 1, 3, 4, 5]].isfinite().all()


@pytest.mark.parametrize("num_experts", [1, 4, 60])
@pytest.mark.parametrize("num_pairs", [1, 16, 40, 2500])
@pytest.mark.parametrize("block_size", [16, 64])
def test_pairs_are_in_blocks_of_one_expert(
    num_pairs: int, num_experts: int, block_size: int, triton_device: torch.device
) -> None:
    """Pairs of an expert in their order, in the fewest possible blocks."""
    from kernels.experts.triton.place import max_blocks, place

    chosen = torch.randint(0, num_experts, (num_pairs, 1), dtype=torch.int32)
    chosen[chosen == 2] = 3  # an expert may have no tokens
    pairs, blocks, num_blocks = place(chosen.to(triton_device), num_experts, block_size)
    expected = chosen.flatten().sort(stable=True)
    assert pairs.tolist() == expected.indices.tolist()
    found: list[int] = []
    for expert, first, end in blocks[:, : int(num_blocks)].T.tolist():
        assert 0 < end - first <= block_size
        assert expected.values[first:end].tolist() == [expert] * (end - first)
        found += range(first, end)
    assert found == list(range(num_pairs))
    counts = chosen.flatten().bincount().tolist()
    assert int(num_blocks) == sum(-(-count // block_size) for count in counts)
    assert int(num_blocks) <= blocks.shape[1] == max_blocks(num_pairs, num_experts, block_size)


def test_unreadable_tensors_are_errors(triton_device: torch.device) -> None:
    layer = dense_layer(3, 32, 16, torch.float32, triton_device)
    x, chosen, weights = tokens_of(2, 3, 2, 32, torch.float32, triton_device)
    with pytest.raises(ValueError, match=r"must be \[T, H\], \[E, 2 I, H\] and \[E, H, I\]"):
        experts(x, chosen, weights, layer.down, layer.gate_up)
    with pytest.raises(ValueError, match="chosen must be int32"):
        experts(x, chosen.long(), weights, *layer)
    biases = Biases(list(torch.zeros(3, 32)), list(torch.zeros(3, 32)))
    with pytest.raises(ValueError, match="the experts' biases must be stacked"):
        experts(x, chosen, weights, *layer, biases=biases)
    with pytest.raises(ValueError, match="must be contiguous"):
        experts(x.T.contiguous().T, chosen, weights, *layer)
    coded = stacked([random_codes("int8", (32, 48), 24) for _ in range(3)], 1, triton_device)
    with pytest.raises(ValueError, match="no kernel reads codes in these groups"):
        experts(
            torch.zeros(2, 48, device=triton_device),
            *(chosen, weights, coded),
            torch.zeros(3, 48, 16, device=triton_device),
        )
