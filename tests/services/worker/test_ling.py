"""Ling 2.5 and Ring-linear 2.0: refusals by name, tensors, drafts, ranks, and native code alone and
in company."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from benchmarks.harness import scheduled
from benchmarks.harness.engines import KERNELS, make_engine
from services.worker.backends.head_limits import check_delta
from services.worker.hybrids.lightning import Lightning, LightningSpec, log_rates
from services.worker.layers.ops import NotSupported
from services.worker.layers.parallel import Parallel
from services.worker.models.registry import read_model_config
from shared.errors import ConfigError
from shared.wire.messages import SamplingParams
from tests.services.worker.checkpoints import (
    VOCAB_SIZE,
    assert_greedy,
    change_config,
    random_prompts,
    save_model,
)
from tests.services.worker.driver import Driver, Job
from tests.services.worker.forward import our_logits
from tests.services.worker.hybrids import HYBRIDS, Sequences, load, save_hybrid
from tests.services.worker.ling import SIZES, BailingMoeV2ForCausalLM
from tests.services.worker.test_gated_delta import Apart, mixed, rewrite

LING, RING = "ling 2.5", "ring-linear 2"
WITH_HEAD = {"num_nextn_predict_layers": 1}


@pytest.mark.parametrize("name", [LING, RING])
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


@pytest.mark.parametrize("name", [LING, RING])
def test_drafts_are_those_of_the_published_code(tmp_path: Path, name: str) -> None:
    save_hybrid(tmp_path, name, **WITH_HEAD)
    family: Any = HYBRIDS[name][0]
    ids = np.random.default_rng(5).integers(8, VOCAB_SIZE, 23).tolist()
    drafts = [9, 31, 80]
    found = Sequences(load(tmp_path), 1).draft_logits(ids, drafts)
    expected = family.from_pretrained(tmp_path).draft_logits(ids, drafts)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kernels", KERNELS)
def test_without_lightning_layers_texts_and_drafts_are_those_of_the_published_code(
    tmp_path: Path, kernels: str
) -> None:
    shape = SIZES | WITH_HEAD | {"layer_group_size": 1}
    save_model(tmp_path, BailingMoeV2ForCausalLM, **shape)
    oracle: Any = BailingMoeV2ForCausalLM.from_pretrained(tmp_path)
    change_config(tmp_path, layer_group_size=None, group_norm_size=None)  # as published
    prompts = random_prompts(4)
    speculation = {"method": "mtp", "num_speculative_tokens": 2, "adaptive": False}
    engine = make_engine(tmp_path, kernels, speculative_config=speculation)
    texts = Driver(engine, [3, 7, 1, 5]).run([Job(prompt) for prompt in prompts])
    for prompt, text in zip(prompts, texts, strict=True):
        assert_greedy(oracle, prompt, text)
    drafts = Sequences(load(tmp_path), 1).draft_logits(prompts[2], [9, 31])
    expected = oracle.draft_logits(prompts[2], [9, 31])
    torch.testing.assert_close(drafts, expected, atol=1e-4, rtol=1e-4)


def test_with_drafts_texts_are_those_without(tmp_path: Path) -> None:
    save_hybrid(tmp_path, LING, **WITH_HEAD)
    params = [SamplingParams(seed=seed, temperature=6.0, max_tokens=12) for seed in range(8)]
    texts = []
    for method in ("mtp", "none"):
        speculation = {"method": method, "num_speculative_tokens": 3, "adaptive": False}
        engine = make_engine(tmp_path, "native", speculative_config=speculation)
        found = scheduled.run(engine, random_prompts(8), params)
        assert (found.num_accepted > 0) == (method == "mtp")
        texts.append(found.texts)
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"use_qk_norm": False}, "use_qk_norm False is not supported; only True is"),
        ({"use_qkv_bias": True}, "use_qkv_bias True is not supported; only False is"),
        ({"use_bias": True}, "use_bias True is not supported; only False is"),
        ({"linear_silu": True}, "linear_silu True is not supported; only False is"),
        ({"score_function": "softmax"}, "score_function 'softmax' is not supported"),
        (
            {"moe_router_enable_expert_bias": False},
            "moe_router_enable_expert_bias False is not supported; only True is",
        ),
        (
            {"num_kv_heads_for_linear_attn": 2},
            "num_kv_heads_for_linear_attn 2 is not supported; only 4 is",
        ),
        (
            {"moe_shared_expert_intermediate_size": 48},
            "moe_shared_expert_intermediate_size 48 is not supported; only 32 is",
        ),
        ({"group_norm_size": 3}, "num_attention_heads 4 is no multiple of group_norm_size 3"),
        (
            {"partial_rotary_factor": 0.1},
            "partial_rotary_factor of head_dim 32: 3 numbers cannot be rotated in pairs",
        ),
        ({"layer_group_size": 0}, r"Expected `int` >= 1 - at `\$.layer_group_size`"),
        ({"num_experts_per_tok": 9}, "its experts cannot be chosen"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported; only 'silu' is"),
    ],
)
def test_a_config_that_does_not_fit_is_refused(
    tmp_path: Path, changes: dict[str, Any], problem: str
) -> None:
    save_hybrid(tmp_path, LING)
    change_config(tmp_path, **changes)
    with pytest.raises(ConfigError, match=problem):
        read_model_config(tmp_path)


@pytest.mark.parametrize(
    ("tensor", "changed", "problem"),
    [
        ("0.attention.g_norm.weight", None, "lacks tensors {}$"),
        ("1.mlp.gate.expert_bias", None, "lacks tensors {}$"),
        ("1.attention.dense.weight", [64, 64], r"{} is .*; .* has \[64, 128\] of floats"),
        ("0.attention.query_key_value.weight", [64, 64], r"{} is .*; .* has \[384, 64\]"),
        ("0.attention.dense.bias", [64], "the architecture has no tensor {}$"),
    ],
)
def test_a_wrong_tensor_is_named(
    tmp_path: Path, tensor: str, changed: list[int] | None, problem: str
) -> None:
    save_hybrid(tmp_path, LING)
    path = f"model.layers.{tensor}"

    def change(tensors: dict[str, Tensor]) -> None:
        tensors.pop(path, None)
        if changed is not None:
            tensors[path] = torch.zeros(changed)

    rewrite(tmp_path, change)
    with pytest.raises(ConfigError, match=problem.format(path)):
        load(tmp_path)


@pytest.mark.parametrize(("name", "num"), [(LING, 2), (RING, 4)])
def test_the_sum_over_ranks_is_the_output_of_one_process(
    tmp_path: Path, name: str, num: int
) -> None:
    """Of lightning attention, and of attention with heads."""
    save_hybrid(tmp_path, name)
    x = torch.randn(9, 64, generator=torch.Generator().manual_seed(1))
    group: Any = Apart()
    whole = mixed(load(tmp_path), x)
    ranks = [load(tmp_path, parallel=Parallel(rank, 2, group)) for rank in range(2)]
    parts = [mixed(each, x) for each in ranks]
    assert len(whole) == num
    for expected, *each in zip(whole, *parts, strict=True):
        torch.testing.assert_close(torch.stack(each).sum(0), expected, atol=1e-5, rtol=1e-4)


def test_ranks_with_parts_of_groups_are_refused(tmp_path: Path) -> None:
    save_hybrid(tmp_path, LING)
    with pytest.raises(ConfigError, match=r"group_norm_size 2 cannot be split over 4 ranks; 1, 2"):
        load(tmp_path, parallel=Parallel(0, 4))


def test_a_layer_has_the_state_of_its_sizes(tmp_path: Path) -> None:
    save_hybrid(tmp_path, LING)
    first, *others = load(tmp_path).state_layers()
    assert isinstance(first, Lightning)
    assert len(others) == 1
    assert first.state_spec == (4, 32, 32, 1, 3 * 128, 0)


def test_decays_are_those_of_the_published_code() -> None:
    """Of the second of twenty layers, with heads of two geometric sequences."""
    rates = [math.exp(each) for each in log_rates(LightningSpec(6, 16, 1, 20), 1)]
    expected = [2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3]
    assert rates == pytest.approx([each * (1 + 1e-5) for each in expected])


def test_heads_that_native_code_cannot_compute_are_refused(tmp_path: Path) -> None:
    save_hybrid(tmp_path, RING, head_dim=24)
    layer, *_ = load(tmp_path).state_layers()
    assert isinstance(layer, Lightning)
    with pytest.raises(NotSupported, match="state 0: head_dim 24 is no multiple of 16"):
        check_delta(layer.rule)
