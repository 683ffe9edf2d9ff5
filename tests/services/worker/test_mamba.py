"""Granite 4: refusals by name, checkpoints in other forms, and native code alone and in company."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import GraniteMoeHybridForCausalLM

from services.worker.hybrids.granite4 import GraniteMoeHybridForCausalLM as Granite4
from services.worker.hybrids.mamba import Mamba
from services.worker.layers.parallel import Parallel
from services.worker.models.registry import read_model_config
from services.worker.weights.load import build_model
from shared.errors import ConfigError
from tests.services.worker.checkpoints import change_config, random_prompts
from tests.services.worker.forward import our_logits
from tests.services.worker.hybrids import CPU, Row, Sequences, load, save_hybrid
from tests.services.worker.test_gated_delta import rewrite

DENSE, EXPERTS = "granite 4, tied", "granite 4, experts, biases of other GEMMs"
GROUPED = "granite 4, rope, two groups"
TYPES = ["mamba", "mamba", "attention", "mamba"]


def config_of(folder: Path) -> Granite4.Config:
    config = read_model_config(folder)
    assert isinstance(config, Granite4.Config)
    return config


@pytest.mark.parametrize("name", [DENSE, GROUPED, EXPERTS])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_prompt_has_the_same_bits_alone_and_with_others(
    tmp_path: Path, name: str, dtype: torch.dtype
) -> None:
    save_hybrid(tmp_path, name)
    prompts = random_prompts(6)
    together = our_logits(tmp_path, prompts, dtype, "native")
    for prompt, logits in zip(prompts, together, strict=True):
        (alone,) = our_logits(tmp_path, [prompt], dtype, "native")
        assert logits.tobytes() == alone.tobytes()


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"layer_types": ["mamba"]}, "layer_types has 1 entries; num_hidden_layers is 4"),
        ({"layer_types": [*TYPES[:3], "moe"]}, "layer_types moe is not supported"),
        ({"layer_types": ["mamba"] * 4}, "no layer is full_attention: one is needed"),
        ({"mamba_n_groups": 3}, "mamba_n_heads 8 is no multiple of mamba_n_groups 3"),
        ({"mamba_d_head": 32}, "8 of mamba_d_head 32 are not mamba_expand 2 times hidden_size 64"),
        ({"mamba_d_conv": 1}, r"Expected `int` >= 2 - at `\$.mamba_d_conv`"),
        ({"position_embedding_type": "alibi"}, r"Invalid enum value 'alibi' - at `\$.position_emb"),
        ({"normalization_function": "layernorm"}, "normalization_function 'layernorm' is not"),
        ({"time_step_limit": [0.5, 0.1]}, r"time_step_limit \(0.5, 0.1\) are not two limits"),
        ({"time_step_limit": [0.0, "x"]}, r"time_step_limit \(0.0, 'x'\) are not two limits"),
        ({"time_step_limit": [0.0, {}]}, r"time_step_limit \(0.0, {}\) are not two limits"),
        ({"num_local_experts": 2, "num_experts_per_tok": 3}, "num_chosen is 3, which must be 1 to"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not supported; only 1.0"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported; only 'silu' is"),
    ],
)
def test_a_config_that_does_not_fit_is_refused(
    tmp_path: Path, changes: dict[str, Any], problem: str
) -> None:
    save_hybrid(tmp_path, DENSE)
    change_config(tmp_path, **changes)
    with pytest.raises(ConfigError, match=problem):
        read_model_config(tmp_path)


def test_older_names_of_layers_and_positions_are_read(tmp_path: Path) -> None:
    """As Granite 4 was published."""
    save_hybrid(tmp_path, DENSE)
    ids = random_prompts(4)[3]
    expected = Sequences(load(tmp_path), 1).step([Row(0, ids)])[0]
    change_config(tmp_path, layer_types=TYPES, position_embedding_type="nope", time_step_limit=None)
    assert Sequences(load(tmp_path), 1).step([Row(0, ids)])[0].tobytes() == expected.tobytes()


def test_sizes_of_layers_that_a_model_lacks_are_not_looked_at(tmp_path: Path) -> None:
    save_hybrid(tmp_path, "granite 4, attention alone")
    change_config(tmp_path, mamba_n_heads=7, mamba_d_head=64)
    assert load(tmp_path).state_specs() == []


def test_steps_are_within_their_limits(tmp_path: Path) -> None:
    """transformers limits the steps of a prompt, and not of single tokens."""
    save_hybrid(tmp_path, DENSE)
    change_config(tmp_path, time_step_limit=[0.3, 0.9])
    oracle = GraniteMoeHybridForCausalLM.from_pretrained(tmp_path).eval()
    ids = random_prompts(4)[3]
    with torch.inference_mode():
        expected = oracle(torch.tensor([ids]), use_cache=False).logits[0].numpy()
    found = Sequences(load(tmp_path), 1).step([Row(0, ids)])[0]
    np.testing.assert_allclose(found, expected, atol=1e-4, rtol=1e-4)
    (native,) = our_logits(tmp_path, [ids], torch.float32, "native")
    np.testing.assert_allclose(native, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("tensor", "changed", "problem"),
    [
        ("D", None, "lacks tensors {}$"),
        ("conv1d.bias", None, "lacks tensors {}$"),
        ("in_proj.weight", [300, 64], r"{} is .* \[300, 64\]; .* has \[328, 64\] of floats"),
        ("in_proj.bias", [328], "the architecture has no tensor {}$"),
    ],
)
def test_a_wrong_tensor_is_named(
    tmp_path: Path, tensor: str, changed: list[int] | None, problem: str
) -> None:
    save_hybrid(tmp_path, DENSE)
    path = f"model.layers.1.mamba.{tensor}"

    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors.pop(path, None)
        if changed is not None:
            tensors[path] = torch.zeros(changed)

    rewrite(tmp_path, change)
    with pytest.raises(ConfigError, match=problem.format(path)):
        load(tmp_path)


@pytest.mark.parametrize(
    ("name", "size", "problem"),
    [
        (DENSE, 2, "mamba_n_groups 1 cannot be split over 2 ranks; 1 would work"),
        (GROUPED, 4, "mamba_n_groups 2 cannot be split over 4 ranks; 1, 2 would work"),
    ],
)
def test_ranks_with_parts_of_groups_are_refused(
    tmp_path: Path, name: str, size: int, problem: str
) -> None:
    """A group has one norm."""
    save_hybrid(tmp_path, name)
    with pytest.raises(ConfigError, match=problem):
        build_model(config_of(tmp_path), torch.float32, CPU, Parallel(0, size))


def test_a_layer_has_the_state_of_its_sizes(tmp_path: Path) -> None:
    save_hybrid(tmp_path, GROUPED)
    first, *others = load(tmp_path).state_layers()
    assert isinstance(first, Mamba)
    assert len(others) == 2
    assert first.state_spec == (8, 32, 16, 3, 128 + 4 * 32, 8)
    assert first.state_spec.num_bytes == 4 * (8 * 32 * 16 + 3 * 256)
    assert first.state_spec.draft_bytes == 4 * (256 + 8)
