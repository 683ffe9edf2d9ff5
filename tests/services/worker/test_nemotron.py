"""Nemotron-H: refusals by name, published configs and tensors, ranks, and native code alone and in
company."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from services.worker.backends.torch_lm import TorchOps
from services.worker.hybrids.nemotron_h import LatentMixture, NemotronHForCausalLM, NemotronLayer
from services.worker.layers.context import forward_context
from services.worker.layers.parallel import Parallel
from services.worker.models.decoder import DecoderLM
from services.worker.models.registry import read_model_config
from services.worker.weights.load import build_model
from shared.errors import ConfigError
from tests.services.worker.checkpoints import change_config, random_prompts
from tests.services.worker.forward import our_logits
from tests.services.worker.hybrids import CPU, Row, Sequences, load, save_hybrid
from tests.services.worker.test_gated_delta import Apart, rewrite

MLPS, EXPERTS, LATENTS = "nemotron-h, biases", "nemotron 3", "nemotron 3, latents"


def logits_of(folder: Path, ids: list[int]) -> bytes:
    return Sequences(load(folder), 1).step([Row(0, ids)])[0].tobytes()


@pytest.mark.parametrize("name", [MLPS, EXPERTS, LATENTS])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_prompt_has_the_same_bits_alone_and_with_others(
    tmp_path: Path, name: str, dtype: torch.dtype
) -> None:
    save_hybrid(tmp_path, name)
    prompts = random_prompts(8)
    together = our_logits(tmp_path, prompts, dtype, "native")
    for prompt, logits in zip(prompts, together, strict=True):
        (alone,) = our_logits(tmp_path, [prompt], dtype, "native")
        assert logits.tobytes() == alone.tobytes()


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"layers_block_type": ["mamba", "mlp"]}, "no layer is full_attention: one is needed"),
        ({"layers_block_type": ["attention", "conv"]}, "layers_block_type conv is not supported"),
        ({"num_hidden_layers": 4}, "layers_block_type has 5 entries; num_hidden_layers is 4"),
        (
            {"layers_block_type": None, "hybrid_override_pattern": "M*X"},
            "hybrid_override_pattern X is not supported",
        ),
        ({"layers_block_type": None}, "no layer is full_attention: one is needed"),
        ({"n_groups": 3}, "mamba_num_heads 8 is no multiple of n_groups 3"),
        ({"conv_kernel": 1}, r"Expected `int` >= 2 - at `\$.conv_kernel`"),
        ({"mlp_hidden_act": "silu"}, "mlp_hidden_act 'silu' is not supported; only 'relu2' is"),
        ({"mamba_hidden_act": "gelu"}, "mamba_hidden_act 'gelu' is not supported; only 'silu' is"),
        ({"n_shared_experts": 2}, "n_shared_experts 2 is not supported; only 1 is"),
        ({"num_experts_per_tok": 0}, "its experts cannot be chosen"),
        ({"time_step_limit": [0.5, 0.1]}, r"time_step_limit \(0.5, 0.1\) are not two limits"),
    ],
)
def test_a_config_that_does_not_fit_is_refused(
    tmp_path: Path, changes: dict[str, Any], problem: str
) -> None:
    save_hybrid(tmp_path, EXPERTS)
    change_config(tmp_path, **changes)
    with pytest.raises(ConfigError, match=problem):
        read_model_config(tmp_path)


def test_a_published_config_is_read(tmp_path: Path) -> None:
    """With a pattern of letters, and infinity as it is."""
    save_hybrid(tmp_path, EXPERTS)
    ids = random_prompts(4)[3]
    expected = logits_of(tmp_path, ids)
    changes = {
        "layers_block_type": None,
        "hybrid_override_pattern": "ME*ME",
        "num_hidden_layers": 5,
        "time_step_limit": [0.0, float("inf")],
    }
    change_config(tmp_path, **changes)
    assert "Infinity]" in json.dumps(json.loads((tmp_path / "config.json").read_text()))
    assert logits_of(tmp_path, ids) == expected


def test_experts_count_only_in_a_model_that_has_some(tmp_path: Path) -> None:
    save_hybrid(tmp_path, MLPS)
    change_config(tmp_path, n_routed_experts=0, num_experts_per_tok=0, n_shared_experts=0)
    assert len(load(tmp_path).state_specs()) == 2


def test_the_mtp_head_is_left_out_with_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_hybrid(tmp_path, EXPERTS)
    ids = random_prompts(4)[3]
    expected = logits_of(tmp_path, ids)

    def add(tensors: dict[str, Tensor]) -> None:
        tensors |= {f"mtp.layers.{i}.norm.weight": torch.ones(64) for i in range(2)}

    rewrite(tmp_path, add)
    change_config(tmp_path, num_nextn_predict_layers=1)
    with caplog.at_level(logging.INFO):
        assert logits_of(tmp_path, ids) == expected
    lines = [each.message for each in caplog.records if "MTP" in each.message]
    assert lines == ["MTP: 2 tensors are left out, and there are no drafts by them"]


@pytest.mark.parametrize(
    ("tensor", "changed", "problem"),
    [
        ("0.mixer.D", None, "lacks tensors {}$"),
        ("1.mixer.fc1_latent_proj.weight", None, "lacks tensors {}$"),
        ("1.mixer.experts.3.up_proj.weight", [32, 64], r"{} is .*; .* has \[32, 32\] of floats"),
        ("1.mixer.experts.3.gate_proj.weight", [32, 32], "the architecture has no tensor {}$"),
    ],
)
def test_a_wrong_tensor_is_named(
    tmp_path: Path, tensor: str, changed: list[int] | None, problem: str
) -> None:
    save_hybrid(tmp_path, LATENTS)
    path = f"backbone.layers.{tensor}"

    def change(tensors: dict[str, Tensor]) -> None:
        tensors.pop(path, None)
        if changed is not None:
            tensors[path] = torch.zeros(changed)

    rewrite(tmp_path, change)
    with pytest.raises(ConfigError, match=problem.format(path)):
        load(tmp_path)


@torch.inference_mode()
def mixed(model: DecoderLM, x: Tensor) -> list[Tensor]:
    """The output, or a rank's part of it, of each mixer for a sequence x [T, hidden]."""
    positions = torch.arange(len(x))
    context = Sequences(model, 1).context([Row(0, [0] * len(x))], positions.numpy())
    found = []
    with forward_context(context):
        ops = TorchOps(positions, parallel=model.parallel)
        for layer in model.model.layers:
            assert isinstance(layer, NemotronLayer)
            zeros = torch.zeros_like(x)
            found.append(layer.mixer.forward(ops, x, norm=layer.norm, residual=zeros))
    return found


@pytest.mark.parametrize("has_whole_experts", [False, True])
@pytest.mark.parametrize("name", [EXPERTS, LATENTS])
def test_the_sum_over_ranks_is_the_output_of_one_process(
    tmp_path: Path, name: str, has_whole_experts: bool
) -> None:
    save_hybrid(tmp_path, name)
    x = torch.randn(9, 64, generator=torch.Generator().manual_seed(1))
    group: Any = Apart()
    whole = mixed(load(tmp_path), x)
    ranks = [Parallel(rank, 2, group, has_whole_experts) for rank in range(2)]
    parts = [mixed(load(tmp_path, parallel=each), x) for each in ranks]
    for expected, *each in zip(whole, *parts, strict=True):
        torch.testing.assert_close(torch.stack(each).sum(0), expected, atol=1e-4, rtol=1e-4)


def test_ranks_with_parts_of_groups_are_refused(tmp_path: Path) -> None:
    """A group has one norm."""
    save_hybrid(tmp_path, EXPERTS)
    config = read_model_config(tmp_path)
    assert isinstance(config, NemotronHForCausalLM.Config)
    with pytest.raises(ConfigError, match=r"n_groups 2 cannot be split over 4 ranks; 1, 2 would"):
        build_model(config, torch.float32, CPU, Parallel(0, 4))


def test_networks_have_one_gemm_before_the_squares(tmp_path: Path) -> None:
    save_hybrid(tmp_path, LATENTS)
    _, layer, *_ = load(tmp_path).model.layers
    assert isinstance(layer, NemotronLayer)
    assert isinstance(layer.mixer, LatentMixture)
    assert layer.mixer.products[0].gate_up_proj.weight.values.shape == (32, 32)
    assert layer.mixer.shared_experts.gate_up_proj.weight.values.shape == (48, 64)
