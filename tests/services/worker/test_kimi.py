"""Kimi Linear: refusals by name, published configs and tensors, ranks, and native code alone and in
company."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from services.worker.hybrids.channel_delta import ChannelDelta
from services.worker.layers.parallel import Parallel
from services.worker.models.registry import read_model_config
from shared.errors import ConfigError
from shared.model_folder import read_model_info
from tests.services.worker.checkpoints import MAX_POSITIONS, change_config, random_prompts
from tests.services.worker.forward import our_logits
from tests.services.worker.hybrids import Row, Sequences, load, save_hybrid
from tests.services.worker.test_gated_delta import Apart, mixed, rewrite

PLAIN, GROUPED = "kimi", "kimi, queries of latents, groups of experts"
PUBLISHED: dict[str, Any] = {
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


@pytest.mark.parametrize("name", [PLAIN, GROUPED])
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


def test_a_published_checkpoint_is_read(tmp_path: Path) -> None:
    """Layers are counted from 1, and the network of the first has another name than experts."""
    save_hybrid(tmp_path, PLAIN)
    ids = random_prompts(4)[3]
    expected = logits_of(tmp_path, ids)

    def rename(tensors: dict[str, Tensor]) -> None:
        for part in ("gate", "up", "down"):
            own = tensors.pop(f"model.layers.0.block_sparse_moe.{part}_proj.weight")
            tensors[f"model.layers.0.mlp.{part}_proj.weight"] = own

    rewrite(tmp_path, rename)
    change_config(tmp_path, **PUBLISHED)
    assert read_model_info(tmp_path, [], None).max_model_len == MAX_POSITIONS
    assert logits_of(tmp_path, ids) == expected


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"layer_types": ["linear_attention"] * 4}, "no layer is full_attention: one is needed"),
        ({"layer_types": ["full_attention"]}, "layer_types has 1 entries; num_hidden_layers is 4"),
        (
            {"layer_types": None, "linear_attn_config": {"full_attn_layers": [1]}},
            "linear_attn_config has 1 entries; num_hidden_layers is 4",
        ),
        ({"mlp_layer_types": ["dense"]}, "mlp_layer_types are not 4 times dense or sparse"),
        ({"mlp_layer_types": ["moe"] * 4}, "mlp_layer_types are not 4 times dense or sparse"),
        ({"mla_use_nope": False}, "mla_use_nope False is not supported; only True is"),
        ({"moe_layer_freq": 2}, "moe_layer_freq 2 is not supported; only 1 is"),
        (
            {"moe_router_activation_func": "softmax"},
            "moe_router_activation_func 'softmax' is not supported; only 'sigmoid' is",
        ),
        ({"num_experts_per_token": 9}, "its experts cannot be chosen"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported; only 'silu' is"),
    ],
)
def test_a_config_that_does_not_fit_is_refused(
    tmp_path: Path, changes: dict[str, Any], problem: str
) -> None:
    save_hybrid(tmp_path, PLAIN)
    change_config(tmp_path, **changes)
    with pytest.raises(ConfigError, match=problem):
        read_model_config(tmp_path)


@pytest.mark.parametrize(
    ("tensor", "changed", "problem"),
    [
        ("q_conv1d.weight", None, "lacks tensors {}$"),
        ("A_log", [1, 1, 3, 1], r"{} is .*; .* has \[1, 1, 4, 1\] of floats"),
        ("dt_bias", [4], r"{} is .* \[4\]; .* has \[128\] of floats"),
        ("g_b_proj.bias", [128], "the architecture has no tensor {}$"),
    ],
)
def test_a_wrong_tensor_is_named(
    tmp_path: Path, tensor: str, changed: list[int] | None, problem: str
) -> None:
    save_hybrid(tmp_path, PLAIN)
    path = f"model.layers.1.self_attn.{tensor}"

    def change(tensors: dict[str, Tensor]) -> None:
        tensors.pop(path, None)
        if changed is not None:
            tensors[path] = torch.zeros(changed)

    rewrite(tmp_path, change)
    with pytest.raises(ConfigError, match=problem.format(path)):
        load(tmp_path)


@pytest.mark.parametrize("size", [2, 4])
def test_the_sum_over_ranks_is_the_output_of_one_process(tmp_path: Path, size: int) -> None:
    save_hybrid(tmp_path, PLAIN)
    x = torch.randn(9, 64, generator=torch.Generator().manual_seed(1))
    group: Any = Apart()
    whole = mixed(load(tmp_path), x)
    ranks = [load(tmp_path, parallel=Parallel(rank, size, group)) for rank in range(size)]
    parts = [mixed(each, x) for each in ranks]
    assert len(whole) == 3
    for number, expected in enumerate(whole):
        total = torch.stack([of_rank[number] for of_rank in parts]).sum(0)
        torch.testing.assert_close(total, expected, atol=1e-5, rtol=1e-4)


def test_ranks_that_heads_do_not_divide_by_are_refused(tmp_path: Path) -> None:
    save_hybrid(tmp_path, PLAIN)
    with pytest.raises(ConfigError, match=r"num_heads 4 .* cannot be split over 3 ranks; 1, 2, 4"):
        load(tmp_path, parallel=Parallel(0, 3))


def test_a_layer_has_the_state_of_its_sizes(tmp_path: Path) -> None:
    save_hybrid(tmp_path, PLAIN)
    first, *others = load(tmp_path).state_layers()
    assert isinstance(first, ChannelDelta)
    assert len(others) == 2
    assert first.state_spec == (4, 32, 32, 4, 3 * 128, 4 + 128)
