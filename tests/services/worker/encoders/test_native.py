"""Encoders on native code, for every variant this CPU can run."""

import copy
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    BertModel,
    Gemma3TextModel,
    ModernBertModel,
    NomicBertModel,
    PreTrainedModel,
)

from kernels.cpu.library import load_library
from kernels.cpu.packing import NativeLibrary
from services.worker.encoders.attention import ATTENTION
from services.worker.encoders.native import NativeTrunk
from services.worker.layers.ops import NotSupported
from tests.encoder_models import SHAPE
from tests.services.worker.builds import each_variant
from tests.services.worker.encoders.test_encoders import GEMMA, NEAR

LENGTHS = [1, 2, 17, 80, 80, 150]
FAMILIES: list[tuple[type[PreTrainedModel], dict[str, Any]]] = [
    (BertModel, {}),
    (ModernBertModel, NEAR),
    (NomicBertModel, {}),
    (Gemma3TextModel, GEMMA),
]


def make_trunk(family: type[PreTrainedModel], dtype: torch.dtype, **changes: Any) -> Any:
    assert family.config_class
    torch.manual_seed(20261201)
    config = family.config_class(**(SHAPE | {"initializer_range": 0.1} | changes))
    config.use_cache = False
    config._attn_implementation = ATTENTION
    trunk = family(config).eval().requires_grad_(requires_grad=False)
    for name, tensor in trunk.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(tensor.data, std=0.3)
    return trunk.to(dtype)


def native(trunk: Any, variant: str, dtype: torch.dtype) -> NativeTrunk:
    return NativeTrunk(trunk, NativeLibrary(load_library(variant), dtype, 2), 160)


def inputs_of(lengths: list[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    ids = np.concatenate([np.random.default_rng(n).integers(4, 64, n) for n in lengths])
    positions = np.concatenate([np.arange(n) for n in lengths])
    return ids, positions, positions % 3 == 2


def expected_states(trunk: Any, lengths: list[int]) -> torch.Tensor:
    ids, positions, types = (torch.from_numpy(each).long()[None] for each in inputs_of(lengths))
    more = {"token_type_ids": types} if hasattr(trunk.config, "type_vocab_size") else {}
    given = {"input_ids": ids, "position_ids": positions, "lengths": lengths}
    states: torch.Tensor = trunk(**given, **more).last_hidden_state[0]
    return states


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("family", "changes"), FAMILIES)
@each_variant
def test_states_match_torch_and_have_the_same_bits_alone(
    variant: str, family: type[PreTrainedModel], changes: dict[str, Any], dtype: torch.dtype
) -> None:
    trunk = make_trunk(family, dtype, **changes)
    exact = expected_states(copy.deepcopy(trunk).float(), LENGTHS)
    torchs = expected_states(trunk, LENGTHS).float()
    encoder = native(trunk, variant, dtype)
    found = encoder.run(*inputs_of(LENGTHS), LENGTHS).clone()
    if dtype == torch.float32:
        assert (found - exact).abs().max() < 2e-5
    else:
        assert (found - exact).abs().mean() < (torchs - exact).abs().mean()
    for states, length in zip(found.split(LENGTHS), LENGTHS, strict=True):
        assert torch.equal(encoder.run(*inputs_of([length]), [length]), states)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@each_variant
def test_a_prompt_that_is_not_finite_spoils_no_later_one(variant: str, dtype: torch.dtype) -> None:
    trunk = make_trunk(BertModel, dtype)
    trunk.embeddings.word_embeddings.weight[3] = torch.nan
    encoder = native(trunk, variant, dtype)
    expected = encoder.run(*inputs_of([17]), [17]).clone()
    ids, positions, types = inputs_of([32])
    assert encoder.run(np.full_like(ids, 3), positions, types, [32]).isnan().all()
    assert torch.equal(encoder.run(*inputs_of([17]), [17]), expected)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"hidden_act": "relu"}, "activation relu"),
        ({"num_attention_heads": 8}, "head size 8 is no multiple of 16"),
        ({"intermediate_size": 100}, "inner size 100 is no multiple of 16"),
    ],
)
@each_variant
def test_other_encoders_stay_with_transformers(
    variant: str, changes: dict[str, Any], reason: str
) -> None:
    trunk = make_trunk(BertModel, torch.float32, **changes)
    before = expected_states(trunk, LENGTHS)
    with pytest.raises(NotSupported, match=reason):
        native(trunk, variant, torch.float32)
    assert torch.equal(expected_states(trunk, LENGTHS), before)
