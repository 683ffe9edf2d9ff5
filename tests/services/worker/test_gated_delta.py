"""Layers with a state and gated attention: their weights, ranks and places."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from services.worker.backends.torch_lm import TorchOps
from services.worker.hybrids.delta_hybrid import GatedDelta, HybridConfig
from services.worker.hybrids.ruled import Advancing, Ruled
from services.worker.layers.attention import Attention
from services.worker.layers.context import forward_context
from services.worker.layers.linear import Linear
from services.worker.layers.parallel import Parallel
from services.worker.layers.stage import Stage
from services.worker.layers.weights import Quantized
from services.worker.machine.kv_groups import group_layers
from services.worker.models.decoder import DecoderLM
from services.worker.models.registry import read_model_config
from services.worker.startup.model_shape import shape_of
from services.worker.weights.dummy import make_dummy
from services.worker.weights.load import build_model
from shared.errors import ConfigError
from shared.model_folder import weight_files
from tests.services.worker.checkpoints import change_config, random_prompts
from tests.services.worker.forward import CAPACITY
from tests.services.worker.hybrids import CPU, HYBRIDS, Row, Sequences, load, save_hybrid
from tests.services.worker.stored_codes import LAYOUTS, save_quantized
from tests.services.worker.test_mtp_families import HYBRID_FAMILIES, Checkpoint

QUANTIZED = (
    *("in_proj_qkv", "in_proj_z", "in_proj_qkvz"),
    *("shared_mlp.input_linear", "shared_mlp.output_linear"),
)
PARTS = ("gate", "up", "down")
KINDS = ["qwen3.5", "qwen3-next"]
WHOLE_GROUPS = {  # of 32 inputs and outputs
    "shared_expert_intermediate_size": 64,
    "shared_intermediate_size": 64,
    "mamba_n_heads": 32,
    "mamba_d_head": 4,
}
GROUPED = "granite 4, rope, two groups"
WEIGHTLESS = (*KINDS, GROUPED, "kimi", "ling 2.5", "nemotron 3")  # each kind of state


class Apart:
    """A group in which each rank keeps its part of a sum."""

    def sum(self, part: Tensor) -> Tensor:
        return part


def tensors_of(folder: Path) -> dict[str, Tensor]:
    return {name: each for file in weight_files(folder) for name, each in load_file(file).items()}


def rewrite(folder: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    (file,) = weight_files(folder)
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, {"format": "pt"})


def mixers(model: DecoderLM) -> list[Advancing | Attention]:
    return [each for each in model.modules() if isinstance(each, Advancing | Attention)]


@torch.inference_mode()
def mixed(model: DecoderLM, x: Tensor) -> list[Tensor]:
    """The output, or a rank's part of it, of each layer with a state or attention for a sequence x
    [T, hidden]."""
    positions = torch.arange(len(x))
    sequences = Sequences(model, 1)
    with forward_context(sequences.context([Row(0, [0] * len(x))], positions.numpy())):
        ops = TorchOps(positions, parallel=model.parallel)
        return [layer.forward(ops, x) for layer in mixers(model)]


def delta_layers(model: DecoderLM) -> list[Ruled]:
    return [each for each in model.state_layers() if isinstance(each, Ruled)]


@pytest.mark.parametrize("name", [*KINDS, GROUPED])
@pytest.mark.parametrize("form", ["wint8", "fp8_block"])
def test_ranks_have_the_codes_of_one_process(tmp_path: Path, name: str, form: Any) -> None:
    save_hybrid(tmp_path, name)
    whole = [each.gates.weight.values for each in delta_layers(load(tmp_path, quantization=form))]
    ranks = [load(tmp_path, quantization=form, parallel=Parallel(rank, 2)) for rank in range(2)]
    parts = [[each.gates.weight.values for each in delta_layers(rank)] for rank in ranks]
    for one, other, expected in zip(*parts, whole, strict=True):
        num_kinds = 1 if name == GROUPED else 2  # dt, or b and a
        kinds = zip(one.chunk(num_kinds), other.chunk(num_kinds), strict=True)
        assert torch.equal(torch.cat([each for of_kind in kinds for each in of_kind]), expected)


@pytest.mark.parametrize("name", ["qwen3.5 with images", "qwen3-next", "granite 4, tied"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_quantized_checkpoints_are_computed_as_their_values(
    tmp_path: Path, name: str, layout: str
) -> None:
    dense, codes = tmp_path / "dense", tmp_path / "codes"
    save_hybrid(dense, name, **WHOLE_GROUPS)
    values = save_quantized(dense, codes, LAYOUTS[layout], QUANTIZED)
    rewrite(dense, lambda tensors: tensors.update(values))
    found = load(codes)
    for layer in mixers(found):
        linears = [each for each in layer.children() if isinstance(each, Linear)]
        dense_ones = [each for each in linears if not isinstance(each.weight, Quantized)]
        assert dense_ones == ([layer.gates] if isinstance(layer, GatedDelta) else [])
    prompt = random_prompts(4)[3]
    expected = Sequences(load(dense), 1).step([Row(0, prompt)])[0]
    logits = Sequences(found, 1).step([Row(0, prompt)])[0]
    np.testing.assert_allclose(logits, expected, atol=1e-4, rtol=1e-4)


def test_experts_in_one_tensor_of_a_layer_are_the_same(tmp_path: Path) -> None:
    """As Qwen3.5 is published."""
    save_hybrid(tmp_path, "qwen3.5 moe with images")
    prompt = random_prompts(4)[3]
    expected = Sequences(load(tmp_path), 1).step([Row(0, prompt)])[0]
    rewrite(tmp_path, stack_experts)
    assert Sequences(load(tmp_path), 1).step([Row(0, prompt)])[0].tobytes() == expected.tobytes()


def stack_experts(tensors: dict[str, Tensor]) -> None:
    for layer in range(4):
        experts = f"model.language_model.layers.{layer}.mlp.experts"
        each = [
            {part: tensors.pop(f"{experts}.{number}.{part}_proj.weight") for part in PARTS}
            for number in range(8)
        ]
        gate_up = [torch.cat([one["gate"], one["up"]]) for one in each]
        tensors[f"{experts}.gate_up_proj"] = torch.stack(gate_up)
        tensors[f"{experts}.down_proj"] = torch.stack([one["down"] for one in each])


def test_tensors_for_images_are_left_out_with_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_hybrid(tmp_path, "qwen3.5 with images")
    with caplog.at_level(logging.INFO):
        load(tmp_path)
    lines = [each.message for each in caplog.records if "images" in each.message]
    assert lines == ["text: 21 tensors for images are not part of it"]


def test_a_text_model_may_have_the_names_of_one_with_images(tmp_path: Path) -> None:
    """Its MTP head has the same names in both."""
    torch.manual_seed(0)
    Checkpoint(HYBRID_FAMILIES["Qwen3.5"], tmp_path)
    ids = random_prompts(4)[3]
    expected = Sequences(load(tmp_path), 1).draft_logits(ids, [9, 8])
    rewrite(tmp_path, lambda tensors: rename(tensors, "model.", "model.language_model."))
    assert torch.equal(Sequences(load(tmp_path), 1).draft_logits(ids, [9, 8]), expected)


def test_keys_next_to_the_text_part_are_for_it_too(tmp_path: Path) -> None:
    save_hybrid(tmp_path, "qwen3.5 with images")
    assert not read_model_config(tmp_path).tie_word_embeddings
    change_config(tmp_path, tie_word_embeddings=True)
    assert read_model_config(tmp_path).tie_word_embeddings


def rename(tensors: dict[str, Tensor], start: str, other: str) -> None:
    for name in [each for each in tensors if each.startswith(start)]:
        tensors[other + name.removeprefix(start)] = tensors.pop(name)


@pytest.mark.parametrize("name", [*KINDS, GROUPED])
def test_small_parameters_are_float32_in_any_model(tmp_path: Path, name: str) -> None:
    save_hybrid(tmp_path, name)
    stored = tensors_of(tmp_path)
    layer = delta_layers(load(tmp_path, torch.bfloat16))[0]
    assert layer.conv.dtype == torch.bfloat16
    path = "model.layers.0." + ("mamba" if name == GROUPED else "linear_attn")
    names = {"decay": "A_log", "dt_bias": "dt_bias", "norm": "norm.weight"}
    for own, theirs in (names | ({"skip": "D"} if name == GROUPED else {})).items():
        assert torch.equal(getattr(layer, own), stored[f"{path}.{theirs}"])


def test_a_problem_of_the_text_part_is_named(tmp_path: Path) -> None:
    save_hybrid(tmp_path, "qwen3.5 with images")
    change_config(tmp_path, text_config={"vocab_size": "many"})
    with pytest.raises(ConfigError, match=r"config.json: text_config: .*\$.vocab_size"):
        read_model_config(tmp_path)


def test_without_layer_types_an_interval_has_the_attention(tmp_path: Path) -> None:
    save_hybrid(tmp_path, "qwen3-next")
    change_config(tmp_path, layer_types=None, full_attention_interval=2)
    config = read_model_config(tmp_path)
    assert isinstance(config, HybridConfig)
    assert config.types == ["linear_attention", "full_attention"] * 2


def test_ranks_that_heads_do_not_divide_by_are_refused(tmp_path: Path) -> None:
    save_hybrid(tmp_path, "qwen3.5", num_attention_heads=6, num_key_value_heads=6)
    config = read_model_config(tmp_path)
    problem = "linear_num_value_heads 4 with linear_num_key_heads 2 .* 3 ranks; 1, 2, 4 would work"
    with pytest.raises(ConfigError, match=problem):
        build_model(config, torch.float32, CPU, Parallel(0, 3))


def test_each_kind_of_layer_has_places_of_its_own(tmp_path: Path) -> None:
    save_hybrid(tmp_path, "qwen3.5", num_hidden_layers=8)
    model = load(tmp_path)
    model.put_groups(group_layers(model.kv_specs(drafts=False), CAPACITY))
    assert [layer.rule.layer for layer in delta_layers(model)] == list(range(6))
    attention = [each for each in model.cached_layers() if isinstance(each, Attention)]
    assert [(each.number, each.heads.layer) for each in attention] == [(3, 0), (7, 1)]
    shape = shape_of(model, torch.float32, drafts=False)
    assert (len(shape.kv_layouts), len(shape.state_specs), shape.layer_groups) == (2, 6, [0, 0])


def test_a_stage_has_the_places_of_its_layers(tmp_path: Path) -> None:
    save_hybrid(tmp_path, "qwen3.5", num_hidden_layers=8)
    stages = [load(tmp_path, parallel=Parallel(0, 1, stage=Stage(each, 2))) for each in range(2)]
    for model, first in zip(stages, (0, 4), strict=True):
        assert len(model.kv_specs(drafts=False)) == 2
        model.put_groups(group_layers(model.kv_specs(drafts=False), CAPACITY))
        numbers = [layer.number for layer in delta_layers(model)]
        assert numbers == [first, first + 1, first + 2]
        assert [layer.rule.layer for layer in delta_layers(model)] == [0, 1, 2]
        assert len(model.state_specs()) == 3
        assert model.layer_groups(drafts=False) == [0]
    with pytest.raises(ConfigError, match="of 4 stages, number 0 would have the layers 0 to 1"):
        load(tmp_path, parallel=Parallel(0, 1, stage=Stage(3, 4)))


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in WEIGHTLESS else pytest.mark.slow) for name in HYBRIDS],
)
def test_a_model_without_weights_is_computed(tmp_path: Path, name: str) -> None:
    save_hybrid(tmp_path, name)
    model = make_dummy(read_model_config(tmp_path), torch.float32, CPU)
    logits = Sequences(model, 1).step([Row(0, [8, 9, 10])])[0]
    assert np.isfinite(logits).all()
