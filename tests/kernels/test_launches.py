"""The engine's launches, all of them, on a simulated GPU: what Triton's launcher passes on."""

import weakref
from collections.abc import Iterator
from importlib import import_module
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch

from benchmarks.gpu.dry_card import DryDriver, dry_card
from kernels.experts import blocks
from services.worker.models.registry import find_model
from services.worker.weights.online import Quantization
from tests.kernels.compiled import needs_compiler
from tests.kernels.dry_engine import MAX_LEN, VOCAB_SIZE, DryEngine, start

MIMO: dict[str, Any] = {"architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}
ALWAYS = "Qwen3-MoE in codes of four bits, a dense layer, its KV cache in int8"
"""Compiled in each run: attention, GEMMs, experts, sampling and codes. The kernels of the other
models take minutes; each also has a test of its own (``test_*_compiles.py``)."""
MODELS: dict[str, dict[str, Any]] = {
    "Qwen3, bfloat16, heads of 128": {"architectures": ["Qwen3ForCausalLM"], "head_size": 128},
    "MiMo, bfloat16, heads of 128": {**MIMO, "head_size": 128},
    ALWAYS: {
        "architectures": ["Qwen3MoeForCausalLM"],
        "head_size": 128,
        "mlp_only_layers": [0],
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 256,
    },
    "MiMo, float32, heads of 64": {**MIMO, "head_size": 64},
    "Gemma 2, bfloat16, heads of 256": {
        "architectures": ["Gemma2ForCausalLM"],
        "head_size": 256,
        "sliding_window": 512,
    },
    "gpt-oss, bfloat16, heads of 64 in two groups": {
        "architectures": ["GptOssForCausalLM"],
        "head_size": 64,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    "Gemma 3, bfloat16, heads of 128 in six groups": {
        "architectures": ["Gemma3ForCausalLM"],
        "head_size": 128,
        "sliding_window": 100,
        "num_hidden_layers": 6,
    },
    "DeepSeek-V3, bfloat16, latents": {
        "architectures": ["DeepseekV3ForCausalLM"],
        "first_k_dense_replace": 1,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 256,
        "q_lora_rank": 128,
    },
    "Qwen3.5, bfloat16, states and drafts": {
        "architectures": ["Qwen3_5ForCausalLM"],
        "head_size": 128,
        "layer_types": ["linear_attention", "full_attention"],
    },
    "Granite 4, bfloat16, Mamba-2 and nothing that turns": {
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "head_size": 64,
        "layer_types": ["linear_attention", "full_attention"],
        "num_local_experts": 0,
        "mamba_n_heads": 8,
        "mamba_d_state": 128,
    },
    "Nemotron 3, bfloat16, layers of one mixer": {
        "architectures": ["NemotronHForCausalLM"],
        "head_size": 64,
        "num_hidden_layers": 4,
        "hybrid_override_pattern": "M*-E",
        "mamba_num_heads": 8,
        "moe_intermediate_size": 256,
        "moe_shared_expert_intermediate_size": 512,
        "moe_latent_size": 128,
    },
    "LFM2, bfloat16, short convolutions": {
        "architectures": ["Lfm2ForCausalLM"],
        "layer_types": ["conv", "full_attention"],
        "tie_word_embeddings": False,
    },
}
# The first test of a model compiles all its kernels.
pytestmark = [needs_compiler, pytest.mark.timeout(900)]
ASKED = {"returns_processed": True, "acceptance": torch.tensor([0.7])}


class Started(NamedTuple):
    card: DryDriver
    engine: DryEngine
    num_drafts: int


@pytest.fixture(autouse=True)
def _unwritten_memory() -> None:
    """Zeros here: kernels of a simulated GPU write nothing for the next to read."""


@pytest.fixture(autouse=True, scope="module")
def _few_are_many() -> Iterator[None]:
    """Prompts of 100 and 240 tokens have the kernels of long ones."""
    warm_up = import_module("services.worker.engine.device.warm_up")
    with (
        patch.object(warm_up, "MANY_TOKENS", 100),
        patch.multiple(blocks, MANY_TOKENS=100, VERY_MANY_TOKENS=240),
    ):
        yield


@pytest.fixture(scope="module", params=list(MODELS))
def started(request: pytest.FixtureRequest) -> Iterator[Started]:
    with dry_card(compiles=False) as card, torch.inference_mode():
        yield started_on(card, request.param)


def started_on(card: DryDriver, name: str) -> Started:
    dtype = torch.float32 if "float32" in name else torch.bfloat16
    config = find_model(MODELS[name]["architectures"]).Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=256,
        intermediate_size=768,
        num_attention_heads=8,
        num_kv_heads=2,
        max_position_embeddings=MAX_LEN,
        rms_norm_eps=1e-6,
        **{"num_hidden_layers": 2} | MODELS[name],
    )
    num_drafts = 2 if "MiMo" in name or "drafts" in name else 0
    block_size, changes = (8, ASKED) if dtype == torch.float32 else (16, {})
    quantization: Quantization = "wint4" if "four bits" in name else "none"
    codes = torch.int8 if "int8" in name else None
    engine = start(config, dtype, num_drafts, block_size, quantization, codes, **changes)
    return Started(card, engine, num_drafts)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name == ALWAYS else pytest.mark.slow) for name in MODELS],
)
def test_no_kernel_spills(name: str) -> None:
    with dry_card() as card, torch.inference_mode():
        started_on(card, name)
    assert card.loaded
    assert [each for each in card.loaded if each.num_stack_bytes] == []


@pytest.mark.parametrize("num_rows", [1, 2, 3, 16, 17, 40])
def test_a_ready_worker_compiles_nothing_to_decode(started: Started, num_rows: int) -> None:
    compiled, num_launches = list(started.card.loaded), started.card.num_launches
    for depth in range(1 + started.num_drafts):
        started.engine.run(started.engine.decode(num_rows, [0, depth]))
    assert started.card.loaded[len(compiled) :] == []
    assert started.card.num_launches > num_launches


@pytest.mark.parametrize("num_rows", [0, 1, 5])
@pytest.mark.parametrize("nums", [[1], [3, 2], [16], [15, 1, 20], [129, 3, 70]], ids=str)
def test_a_ready_worker_compiles_nothing_for_prompts(
    started: Started, num_rows: int, nums: list[int]
) -> None:
    compiled = list(started.card.loaded)
    for depth in range(1 + started.num_drafts if num_rows else 1):
        started.engine.run(started.engine.mix(num_rows, depth, nums))
    assert started.card.loaded[len(compiled) :] == []


def test_a_ready_worker_compiles_nothing_for_prompts_of_any_length(started: Started) -> None:
    compiled = list(started.card.loaded)
    for nums in ([60, 20], [150], [245]):
        started.engine.run(started.engine.mix(1, 0, nums))
    assert started.card.loaded[len(compiled) :] == []


def test_a_ready_worker_compiles_nothing_for_logits_rules(started: Started) -> None:
    compiled = list(started.card.loaded)
    for step in (started.engine.decode(3, [started.num_drafts]), started.engine.mix(2, 0, [9, 8])):
        started.engine.run(step, is_adjusted=True)
    assert started.card.loaded[len(compiled) :] == []


def test_results_are_freed_with_their_step(started: Started) -> None:
    """Without the garbage collector: nothing refers back to the step."""
    step = started.engine.decode(2, [0])
    logits = weakref.ref(step.forward())
    assert logits() is not None
    del step
    assert logits() is None
