"""Kimi Linear, Granite 4 and Nemotron-H: published configs and tensors, and Nemotron's mixers."""

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import GraniteMoeHybridForCausalLM

from services.worker.backends.torch_lm import TorchOps
from services.worker.hybrids.nemotron_h import LatentMixture, NemotronLayer
from services.worker.layers.context import forward_context
from services.worker.layers.parallel import Parallel
from services.worker.models.decoder import DecoderLM
from shared.model_folder import read_model_info
from tests.services.worker.checkpoints import MAX_POSITIONS, change_config, random_prompts
from tests.services.worker.forward import our_logits
from tests.services.worker.hybrids import Row, Sequences, load, save_hybrid
from tests.services.worker.test_gated_delta import Apart, rewrite

MLPS, EXPERTS, LATENTS = "nemotron-h, biases", "nemotron 3", "nemotron 3, latents"
KIMI, GRANITE = "kimi", "granite 4, tied"
PUBLISHED_KIMI: dict[str, Any] = {
    "layer_types": None,
    "mlp_layer_types": None,
    "linear_head_dim": 7,
    "linear_num_heads": 7,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "mla_use_nope": True,
    "linear_attn_config": {
        "full_attn_layers": [3],
        "kda_layers": [1, 2, 4],
        "head_dim": 32,
        "num_heads": 4,
        "short_conv_kernel_size": 4,
    },
}


def logits_of(folder: Path, ids: list[int]) -> bytes:
    return Sequences(load(folder), 1).step([Row(0, ids)])[0].tobytes()


def test_a_published_checkpoint_of_kimi_is_read(tmp_path: Path) -> None:
    """Layers are counted from 1, and the network of the first has another name than experts."""
    save_hybrid(tmp_path, KIMI)
    ids = random_prompts(4)[3]
    expected = logits_of(tmp_path, ids)

    def rename(tensors: dict[str, Tensor]) -> None:
        for part in ("gate", "up", "down"):
            own = tensors.pop(f"model.layers.0.block_sparse_moe.{part}_proj.weight")
            tensors[f"model.layers.0.mlp.{part}_proj.weight"] = own

    rewrite(tmp_path, rename)
    change_config(tmp_path, **PUBLISHED_KIMI)
    assert read_model_info(tmp_path, [], None).max_model_len == MAX_POSITIONS
    assert logits_of(tmp_path, ids) == expected


def test_older_names_of_layers_and_positions_are_read(tmp_path: Path) -> None:
    """As Granite 4 was published."""
    save_hybrid(tmp_path, GRANITE)
    ids = random_prompts(4)[3]
    expected, types = logits_of(tmp_path, ids), ["mamba", "mamba", "attention", "mamba"]
    change_config(tmp_path, layer_types=types, position_embedding_type="nope", time_step_limit=None)
    assert logits_of(tmp_path, ids) == expected


def test_sizes_of_layers_that_a_model_lacks_are_not_looked_at(tmp_path: Path) -> None:
    save_hybrid(tmp_path, "granite 4, attention alone")
    change_config(tmp_path, mamba_n_heads=7, mamba_d_head=64)
    assert load(tmp_path).state_specs() == []


def test_steps_are_within_their_limits(tmp_path: Path) -> None:
    """transformers limits the steps of a prompt, and not of single tokens."""
    save_hybrid(tmp_path, GRANITE)
    change_config(tmp_path, time_step_limit=[0.3, 0.9])
    oracle = GraniteMoeHybridForCausalLM.from_pretrained(tmp_path).eval()
    ids = random_prompts(4)[3]
    with torch.inference_mode():
        expected = oracle(torch.tensor([ids]), use_cache=False).logits[0].numpy()
    found = Sequences(load(tmp_path), 1).step([Row(0, ids)])[0]
    np.testing.assert_allclose(found, expected, atol=1e-4, rtol=1e-4)
    (native,) = our_logits(tmp_path, [ids], torch.float32, "native")
    np.testing.assert_allclose(native, expected, atol=1e-4, rtol=1e-4)


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


def test_an_mtp_head_of_other_layers_is_left_out_with_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_hybrid(tmp_path, EXPERTS)
    ids = random_prompts(4)[3]
    expected = logits_of(tmp_path, ids)

    def add(tensors: dict[str, Tensor]) -> None:
        tensors |= {f"mtp.layers.{i}.norm.weight": torch.ones(64) for i in range(2)}

    rewrite(tmp_path, add)
    kinds = ["full_attention", "mlp"]
    change_config(tmp_path, num_nextn_predict_layers=1, mtp_layers_block_type=kinds)
    with caplog.at_level(logging.INFO):
        assert logits_of(tmp_path, ids) == expected
    lines = [each.message for each in caplog.records if "MTP" in each.message]
    assert lines == ["MTP: 2 tensors are left out, and there are no drafts by them"]


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


def test_networks_have_one_gemm_before_the_squares(tmp_path: Path) -> None:
    save_hybrid(tmp_path, LATENTS)
    _, layer, *_ = load(tmp_path).model.layers
    assert isinstance(layer, NemotronLayer)
    assert isinstance(layer.mixer, LatentMixture)
    assert layer.mixer.products[0].gate_up_proj.weight.values.shape == (32, 32)
    assert layer.mixer.shared_experts is not None
    assert layer.mixer.shared_experts.gate_up_proj.weight.values.shape == (48, 64)
