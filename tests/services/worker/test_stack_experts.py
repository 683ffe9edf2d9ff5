"""Stacked expert weights: the same values, in the same memory as each expert's own."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from kernels.codes import Codes
from services.worker.engine.device.stack_experts import stack_experts
from services.worker.layers.linear import Linear
from services.worker.layers.weights import Dense
from services.worker.models.decoder import DecoderLM
from services.worker.weights.checkpoint import open_checkpoint
from services.worker.weights.load import quantize
from services.worker.weights.online import ONLINE, Quantization
from services.worker.weights.stacked_experts import with_experts
from tests.services.worker.test_native import EXPERTS, experts_of, make_config, make_model

QUANTIZATIONS: tuple[Quantization, ...] = ("none", *ONLINE)


def make(**changes: Any) -> DecoderLM:
    return make_model(msgspec.structs.replace(make_config(EXPERTS), **changes), torch.float32)


def linears(model: DecoderLM, part: str) -> list[list[Linear]]:
    return [[getattr(each, part) for each in layer.products] for layer in experts_of(model)]


def values_of(linear: Linear) -> Tensor:
    return linear.weight.values.clone()


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_each_expert_is_left_with_its_part(quantization: Quantization) -> None:
    model = make()
    for part in ("gate_up_proj", "down_proj"):
        for layer in linears(model, part):
            for linear in layer:
                quantize(linear, quantization)
    before = {
        part: [[values_of(linear) for linear in layer] for layer in linears(model, part)]
        for part in ("gate_up_proj", "down_proj")
    }
    stack_experts(model)
    for part, name in (("gate_up_proj", "gate_up"), ("down_proj", "down")):
        for index, (layer, experts) in enumerate(
            zip(linears(model, part), experts_of(model), strict=True)
        ):
            stack: Tensor | Codes = getattr(experts.stacks, name)
            assert stack.shape == (len(layer), layer[0].outputs, layer[0].inputs)
            for num, linear in enumerate(layer):
                expected = before[part][index][num]
                assert torch.equal(values_of(linear), expected)
                if isinstance(stack, Codes):
                    assert torch.equal(stack.expert(num).values(torch.float32), expected)
                    assert own(linear) == stack.codes[num].data_ptr()
                else:
                    assert torch.equal(stack[num], expected)
                    assert own(linear) == stack[num].data_ptr()


def own(linear: Linear) -> int:
    weight = linear.weight
    return (weight.values if isinstance(weight, Dense) else weight.codes).data_ptr()


def test_zeros_and_wide_scales_of_some_experts_match_all() -> None:
    model = make()
    layer = linears(model, "down_proj")[0]
    for linear in layer:
        quantize(linear, "wint8")
    first, second = (linear.weight for linear in layer[:2])
    assert not isinstance(first, Dense)
    assert not isinstance(second, Dense)
    first.zeros = torch.ones_like(first.scales)
    second.scales.data = second.scales.float() * 1.0009765625
    expected = [values_of(linear) for linear in layer]
    stack_experts(model)
    stacks = experts_of(model)[0].stacks
    assert stacks is not None
    assert isinstance(stacks.down, Codes)
    for num, linear in enumerate(layer):
        assert torch.equal(stacks.down.expert(num).values(torch.float32), expected[num])
        assert torch.equal(values_of(linear), expected[num])


@pytest.mark.parametrize("inner", [64, 32, 48])
@pytest.mark.parametrize("has_inputs_first", [False, True])
def test_each_layout_of_stacks_is_found_by_its_sizes(
    tmp_path: Path, inner: int, has_inputs_first: bool
) -> None:
    """Also if one of both stacks is square."""
    stacks = {"gate_up": torch.randn(2, 2 * inner, 64), "down": torch.randn(2, 64, inner)}
    stored = {
        f"mlp.experts.{name}_proj": (each.mT if has_inputs_first else each).contiguous()
        for name, each in stacks.items()
    }
    save_file(stored, tmp_path / "model.safetensors")
    architectures = ["Qwen3VLMoeForConditionalGeneration"]
    config = msgspec.structs.replace(
        make_config(EXPERTS), architectures=architectures, hidden_size=64
    )
    checkpoint = with_experts(open_checkpoint([tmp_path / "model.safetensors"]), config)
    for part, expected in (("up", stacks["gate_up"][1, inner:]), ("down", stacks["down"][1])):
        found = checkpoint.find(f"mlp.experts.1.{part}_proj.weight")
        assert found is not None
        assert torch.equal(found.read_all(), expected)
