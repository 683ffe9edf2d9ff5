"""Each kind of rotary positions against transformers' own functions."""

from itertools import product
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from services.worker.config.frequencies import ROPES, read_rope
from services.worker.layers.rope import RotaryEmbedding

MAX_POSITIONS = 4096
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
KINDS: list[dict[str, Any]] = [
    {"rope_type": "default", "rope_theta": 10000.0},
    {"rope_type": "default", "rope_theta": 500000.0},
    {"rope_type": "linear", "factor": 2.5},
    {"rope_type": "dynamic", "factor": 4.0},
    {"rope_type": "llama3", "original_max_position_embeddings": 512, **LLAMA3},
    {"rope_type": "llama3", "rope_theta": 500000.0, "original_max_position_embeddings": 8192}
    | {"factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024},
    {"rope_type": "yarn", "factor": 16.0, "rope_theta": 1e6, "attention_factor": 0.7},
    {"rope_type": "yarn", "factor": 8.0, "beta_fast": 16.0, "beta_slow": 2.0, "truncate": False},
    {"rope_type": "yarn", "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.6},
    {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 4},
    {"rope_type": "yarn", "factor": 1.0, "beta_fast": 9.0, "beta_slow": 9.0},
]


def complete(kind: dict[str, Any]) -> dict[str, Any]:
    """With the values every model's config has."""
    defaults = {"rope_theta": 10000.0, "original_max_position_embeddings": MAX_POSITIONS}
    return {**defaults, **kind, "max_position_embeddings": MAX_POSITIONS}


def llama_config(kind: dict[str, Any], head_dim: int) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        head_dim=head_dim,
        max_position_embeddings=MAX_POSITIONS,
        rope_parameters=dict(kind),
    )


def test_every_kind_is_compared_below() -> None:
    assert {kind["rope_type"] for kind in KINDS} | {"factors"} == set(ROPES)


def test_factors_are_of_one_pair_each() -> None:
    """Those of Llama 3 make its frequencies."""
    plain = read_rope(complete({"rope_type": "default"})).frequencies(64, 100)
    llama3 = {"rope_type": "llama3", "original_max_position_embeddings": 512, **LLAMA3}
    slow = read_rope(complete(llama3)).frequencies(64, 100)
    factors = {"rope_type": "factors", "factors": (plain / slow).tolist()}
    found = read_rope(complete(factors)).frequencies(64, 100)
    torch.testing.assert_close(found, slow, rtol=1e-6, atol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_frequencies_match_transformers(kind: dict[str, Any], subtests: pytest.Subtests) -> None:
    lengths = (1, 100, MAX_POSITIONS, MAX_POSITIONS + 1, 30000)
    for head_dim, length in product((8, 64, 128), lengths):
        with subtests.test(head_dim=head_dim, length=length):
            config = llama_config(kind, head_dim)
            if kind["rope_type"] == "default":
                true, magnitude = LlamaRotaryEmbedding.compute_default_rope_parameters(config)
            else:
                true, magnitude = ROPE_INIT_FUNCTIONS[kind["rope_type"]](config, seq_len=length)
            rope = read_rope(complete(kind))
            torch.testing.assert_close(rope.frequencies(head_dim, length), true, rtol=1e-6, atol=0)
            assert rope.magnitude == pytest.approx(magnitude, rel=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_tables_match_transformers(kind: dict[str, Any]) -> None:
    oracle = LlamaRotaryEmbedding(llama_config(kind, 64))
    positions = torch.arange(MAX_POSITIONS)
    cos, sin = oracle(torch.zeros(1), positions[None])
    our_cos, our_sin = RotaryEmbedding(read_rope(complete(kind)), 64, MAX_POSITIONS)(positions)
    torch.testing.assert_close(our_cos, cos[0], atol=1e-3, rtol=0)
    torch.testing.assert_close(our_sin[:, 32:], sin[0, :, 32:], atol=1e-3, rtol=0)
    torch.testing.assert_close(our_sin[:, :32], -sin[0, :, :32], atol=1e-3, rtol=0)


def test_a_dynamic_model_is_unscaled_up_to_its_positions_and_slower_beyond() -> None:
    dynamic = read_rope(complete({"rope_type": "dynamic", "factor": 4.0}))
    default = read_rope(complete({"rope_type": "default"}))
    unscaled = default.frequencies(64, MAX_POSITIONS)
    torch.testing.assert_close(dynamic.frequencies(64, MAX_POSITIONS), unscaled, rtol=0, atol=0)
    assert (dynamic.frequencies(64, 2 * MAX_POSITIONS)[1:] < unscaled[1:]).all()


def test_a_plan_has_the_size_of_a_table_that_is_not_computed() -> None:
    """On meta torch's arithmetic imports its compiler, which takes seconds."""
    rope = Mock()
    with torch.device("meta"):
        planned = RotaryEmbedding(rope, 64, MAX_POSITIONS).table
    rope.frequencies.assert_not_called()
    table = RotaryEmbedding(read_rope(complete(KINDS[0])), 64, MAX_POSITIONS).table
    assert (planned.shape, planned.dtype) == (table.shape, table.dtype)
