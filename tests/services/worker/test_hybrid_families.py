"""Models with layers of a state: native code alone and in company, refusals by name, ranks, and the
sizes of states."""

import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from services.worker.hybrids.channel_delta import ChannelDelta
from services.worker.hybrids.lightning import Lightning
from services.worker.hybrids.mamba import Mamba
from services.worker.layers.parallel import Parallel
from services.worker.models.registry import read_model_config
from shared.errors import ConfigError
from tests.services.worker.checkpoints import change_config, random_prompts
from tests.services.worker.forward import our_logits
from tests.services.worker.hybrids import load, save_hybrid
from tests.services.worker.test_gated_delta import Apart, mixed, rewrite

KIMI, KIMI_GROUPS = "kimi", "kimi, queries of latents, groups of experts"
LING, RING = "ling 2.5", "ring-linear 2"
GRANITE, GRANITE_EXPERTS = "granite 4, tied", "granite 4, experts, biases of other GEMMs"
GRANITE_GROUPS = "granite 4, rope, two groups"
NEMOTRON_H, NEMOTRON, NEMOTRON_LATENTS = "nemotron-h, biases", "nemotron 3", "nemotron 3, latents"
QWEN, QWEN_NEXT = "qwen3.5", "qwen3-next"
ATTENTION = "no layer is full_attention: one is needed"
MAMBA = ["mamba", "mamba", "attention", "mamba"]

Saved = Callable[[str], Path]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """The folder of a checkpoint, which no test changes."""

    @cache
    def of_name(name: str) -> Path:
        folder = tmp_path_factory.mktemp("hybrid")
        save_hybrid(folder, name)
        return folder

    return of_name


@pytest.mark.parametrize(
    "name",
    [
        *(KIMI, LING, GRANITE, NEMOTRON),
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in (
                *(KIMI_GROUPS, RING, GRANITE_EXPERTS, GRANITE_GROUPS),
                *(NEMOTRON_H, NEMOTRON_LATENTS),
            )
        ),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_prompt_has_the_same_bits_alone_and_with_others(
    saved: Saved, name: str, dtype: torch.dtype
) -> None:
    prompts = random_prompts(5)
    together = our_logits(saved(name), prompts, dtype, "native")
    for prompt, logits in zip(prompts, together, strict=True):
        (alone,) = our_logits(saved(name), [prompt], dtype, "native")
        assert logits.tobytes() == alone.tobytes()


def only(**changes: Any) -> tuple[dict[str, Any], str]:
    """A field and the one supported value, of (refused, supported)."""
    ((name, (refused, supported)),) = changes.items()
    return {name: refused}, f"{name} {refused!r} is not supported; only {supported!r} is"


REFUSED: dict[str, list[tuple[dict[str, Any], str]]] = {
    QWEN: [
        ({"layer_types": ["full_attention"]}, "layer_types has 1 entries; num_hidden_layers is 4"),
        (
            {"layer_types": ["full_attention", "linear_attention", "mamba", "sliding_attention"]},
            "layer_types mamba, sliding_attention is not supported",
        ),
        ({"layer_types": ["linear_attention"] * 4}, ATTENTION),
        (
            {"linear_num_value_heads": 5},
            "linear_num_value_heads 5 is no multiple of linear_num_key_heads 2",
        ),
        ({"linear_conv_kernel_dim": 1}, r"Expected `int` >= 2 - at `\$.linear_conv_kernel_dim`"),
    ],
    KIMI: [
        ({"layer_types": ["linear_attention"] * 4}, ATTENTION),
        ({"layer_types": ["full_attention"]}, "layer_types has 1 entries; num_hidden_layers is 4"),
        (
            {"layer_types": None, "linear_attn_config": {"full_attn_layers": [1]}},
            "linear_attn_config has 1 entries; num_hidden_layers is 4",
        ),
        ({"mlp_layer_types": ["dense"]}, "mlp_layer_types are not 4 times dense or sparse"),
        ({"mlp_layer_types": ["moe"] * 4}, "mlp_layer_types are not 4 times dense or sparse"),
        only(mla_use_nope=(False, True)),
        only(moe_layer_freq=(2, 1)),
        only(moe_router_activation_func=("softmax", "sigmoid")),
        ({"num_experts_per_token": 9}, "its experts cannot be chosen"),
        only(hidden_act=("gelu", "silu")),
    ],
    LING: [
        only(use_qk_norm=(False, True)),
        only(use_qkv_bias=(True, False)),
        only(use_bias=(True, False)),
        only(linear_silu=(True, False)),
        ({"score_function": "softmax"}, "score_function 'softmax' is not supported"),
        only(moe_router_enable_expert_bias=(False, True)),
        only(num_kv_heads_for_linear_attn=(2, 4)),
        only(moe_shared_expert_intermediate_size=(48, 32)),
        ({"group_norm_size": 3}, "num_attention_heads 4 is no multiple of group_norm_size 3"),
        (
            {"partial_rotary_factor": 0.1},
            "partial_rotary_factor of head_dim 32: 3 numbers cannot be rotated in pairs",
        ),
        ({"layer_group_size": 0}, r"Expected `int` >= 1 - at `\$.layer_group_size`"),
        ({"num_experts_per_tok": 9}, "its experts cannot be chosen"),
        only(hidden_act=("gelu", "silu")),
    ],
    GRANITE: [
        ({"layer_types": ["mamba"]}, "layer_types has 1 entries; num_hidden_layers is 4"),
        ({"layer_types": [*MAMBA[:3], "moe"]}, "layer_types moe is not supported"),
        ({"layer_types": ["mamba"] * 4}, ATTENTION),
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
        only(hidden_act=("gelu", "silu")),
    ],
    NEMOTRON: [
        ({"layers_block_type": ["mamba", "mlp"]}, ATTENTION),
        ({"layers_block_type": ["attention", "conv"]}, "layers_block_type conv is not supported"),
        ({"num_hidden_layers": 4}, "layers_block_type has 5 entries; num_hidden_layers is 4"),
        (
            {"layers_block_type": None, "hybrid_override_pattern": "M*X"},
            "hybrid_override_pattern X is not supported",
        ),
        ({"layers_block_type": None}, ATTENTION),
        ({"n_groups": 3}, "mamba_num_heads 8 is no multiple of n_groups 3"),
        ({"conv_kernel": 1}, r"Expected `int` >= 2 - at `\$.conv_kernel`"),
        only(mlp_hidden_act=("silu", "relu2")),
        only(mamba_hidden_act=("gelu", "silu")),
        only(n_shared_experts=(2, 1)),
        ({"num_experts_per_tok": 0}, "its experts cannot be chosen"),
        ({"time_step_limit": [0.5, 0.1]}, r"time_step_limit \(0.5, 0.1\) are not two limits"),
    ],
}


@pytest.mark.parametrize(
    ("name", "changes", "problem"),
    [(name, *refused) for name, of_name in REFUSED.items() for refused in of_name],
)
def test_a_config_that_does_not_fit_is_refused(
    saved: Saved, tmp_path: Path, name: str, changes: dict[str, Any], problem: str
) -> None:
    shutil.copy(saved(name) / "config.json", tmp_path)
    change_config(tmp_path, **changes)
    with pytest.raises(ConfigError, match=problem):
        read_model_config(tmp_path)


LACKS, UNKNOWN = "lacks tensors {}$", "the architecture has no tensor {}$"
DELTA, OF_KIMI = "model.layers.1.linear_attn", "model.layers.1.self_attn"
OF_MAMBA, OF_NEMOTRON = "model.layers.1.mamba", "backbone.layers"


@pytest.mark.parametrize(
    ("name", "tensor", "changed", "problem"),
    [
        (QWEN, f"{DELTA}.in_proj_z.weight", None, LACKS),
        (QWEN, f"{DELTA}.A_log", None, LACKS),
        (QWEN, f"{DELTA}.conv1d.weight", [192, 4], r"{} is .* \[192, 4\];.* has \[192, 1, 4\] of"),
        (QWEN, f"{DELTA}.norm.weight", [128], r"{} is .* \[128\]; .* has \[32\] of floats"),
        (QWEN, f"{DELTA}.conv1d.bias", [192], UNKNOWN),
        (QWEN_NEXT, f"{DELTA}.in_proj_qkvz.weight", [192, 64], r"{} .* has \[320, 64\] of floats"),
        (QWEN_NEXT, f"{DELTA}.in_proj_ba.weight", None, LACKS),
        (QWEN_NEXT, f"{DELTA}.in_proj_z.weight", [128, 64], UNKNOWN),
        (KIMI, f"{OF_KIMI}.q_conv1d.weight", None, LACKS),
        (KIMI, f"{OF_KIMI}.A_log", [1, 1, 3, 1], r"{} is .*; .* has \[1, 1, 4, 1\] of floats"),
        (KIMI, f"{OF_KIMI}.dt_bias", [4], r"{} is .* \[4\]; .* has \[128\] of floats"),
        (KIMI, f"{OF_KIMI}.g_b_proj.bias", [128], UNKNOWN),
        (LING, "model.layers.0.attention.g_norm.weight", None, LACKS),
        (LING, "model.layers.1.mlp.gate.expert_bias", None, LACKS),
        (LING, "model.layers.1.attention.dense.weight", [64, 64], r"{} .* has \[64, 128\] of"),
        (LING, "model.layers.0.attention.query_key_value.weight", [64, 64], r"{} .* \[384, 64\]"),
        (LING, "model.layers.0.attention.dense.bias", [64], UNKNOWN),
        (GRANITE, f"{OF_MAMBA}.D", None, LACKS),
        (GRANITE, f"{OF_MAMBA}.conv1d.bias", None, LACKS),
        (GRANITE, f"{OF_MAMBA}.in_proj.weight", [300, 64], r"{} .* \[300, 64\]; .* \[328, 64\] of"),
        (GRANITE, f"{OF_MAMBA}.in_proj.bias", [328], UNKNOWN),
        (NEMOTRON_LATENTS, f"{OF_NEMOTRON}.0.mixer.D", None, LACKS),
        (NEMOTRON_LATENTS, f"{OF_NEMOTRON}.1.mixer.fc1_latent_proj.weight", None, LACKS),
        (
            NEMOTRON_LATENTS,
            f"{OF_NEMOTRON}.1.mixer.experts.3.up_proj.weight",
            [32, 64],
            r"{} is .*; .* has \[32, 32\] of floats",
        ),
        (
            NEMOTRON_LATENTS,
            f"{OF_NEMOTRON}.1.mixer.experts.3.gate_proj.weight",
            [32, 32],
            UNKNOWN,
        ),
    ],
)
def test_a_wrong_tensor_is_named(
    saved: Saved, tmp_path: Path, name: str, tensor: str, changed: list[int] | None, problem: str
) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors.pop(tensor, None)
        if changed is not None:
            tensors[tensor] = torch.zeros(changed)

    shutil.copytree(saved(name), tmp_path, dirs_exist_ok=True)
    rewrite(tmp_path, change)
    with pytest.raises(ConfigError, match=problem.format(tensor)):
        load(tmp_path)


@pytest.mark.parametrize(
    ("name", "size", "num"),
    [
        *((name, size, 4) for name in (QWEN, QWEN_NEXT) for size in (2, 4)),
        *((GRANITE_GROUPS, 2, 4), (KIMI, 2, 3), (KIMI, 4, 3), (LING, 2, 2), (RING, 2, 4)),
    ],
)
def test_the_sum_over_ranks_is_the_output_of_one_process(
    saved: Saved, name: str, size: int, num: int
) -> None:
    """Four value heads, two key heads and two KV heads: four ranks have some of these twice."""
    x = torch.randn(9, 64, generator=torch.Generator().manual_seed(1))
    group: Any = Apart()
    whole = mixed(load(saved(name)), x)
    ranks = [load(saved(name), parallel=Parallel(rank, size, group)) for rank in range(size)]
    parts = [mixed(each, x) for each in ranks]
    assert len(whole) == num
    for expected, *each in zip(whole, *parts, strict=True):
        torch.testing.assert_close(torch.stack(each).sum(0), expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("name", "num", "problem"),
    [
        (KIMI, 3, "num_heads 4 .* cannot be split over 3 ranks; 1, 2, 4"),
        (LING, 4, "group_norm_size 2 cannot be split over 4 ranks; 1, 2"),
        (GRANITE, 2, "mamba_n_groups 1 cannot be split over 2 ranks; 1 would work"),
        (GRANITE_GROUPS, 4, "mamba_n_groups 2 cannot be split over 4 ranks; 1, 2 would work"),
        (NEMOTRON, 4, "n_groups 2 cannot be split over 4 ranks; 1, 2 would"),
    ],
)
def test_ranks_with_parts_of_heads_or_of_groups_are_refused(
    saved: Saved, name: str, num: int, problem: str
) -> None:
    """A group has one norm."""
    with pytest.raises(ConfigError, match=problem):
        load(saved(name), parallel=Parallel(0, num))


@pytest.mark.parametrize(
    ("name", "kind", "num", "spec"),
    [
        (KIMI, ChannelDelta, 3, (4, 32, 32, 4, 3 * 128, 4 + 128)),
        (LING, Lightning, 2, (4, 32, 32, 1, 3 * 128, 0)),
        (GRANITE_GROUPS, Mamba, 3, (8, 32, 16, 3, 128 + 4 * 32, 8)),
    ],
)
def test_a_layer_has_the_state_of_its_sizes(
    saved: Saved, name: str, kind: type, num: int, spec: tuple[int, ...]
) -> None:
    layers = load(saved(name)).state_layers()
    assert len(layers) == num
    assert isinstance(layers[0], kind)
    assert layers[0].state_spec == spec
    heads, key_dim, value_dim, width, channels, gates = spec
    assert layers[0].state_spec.num_bytes == 4 * (heads * key_dim * value_dim + width * channels)
    assert layers[0].state_spec.draft_bytes == 4 * (channels + gates)
