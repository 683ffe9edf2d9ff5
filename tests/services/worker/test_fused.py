"""The fused operators' model beside the layers', on torch's versions of them."""

import msgspec
import pytest
import torch
from torch import Tensor, nn

from services.worker.backends.fused import FusedLM
from services.worker.config.model_config import ModelConfig
from services.worker.layers.embedding import LMHead
from services.worker.layers.linear import empty_parameter
from services.worker.models import CausalLM
from tests.services.worker.device_contexts import OnDevice
from tests.services.worker.test_native import (
    SHAPES,
    furthest,
    make_config,
    make_model,
    random_prompts,
    run,
)

pytestmark = pytest.mark.usefixtures("_unwritten_memory")

MIMO = "Qwen2, biases"


class Drafts(CausalLM):
    """Makes the logits of a model's MTP head for a token and for its own output once more."""

    def __init__(self, model: CausalLM) -> None:
        nn.Module.__init__(self)
        self._model = model

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        hidden = self._model(input_ids, positions)
        return self._model.mtp(hidden, input_ids, positions)

    def logits(self, hidden: Tensor) -> Tensor:
        return self._model.mtp_logits(hidden)


def make_fused(config: ModelConfig, dtype: torch.dtype) -> FusedLM:
    return FusedLM(make_model(config, dtype))


def mimo_config() -> ModelConfig:
    changes = {"architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}
    return msgspec.structs.replace(make_config(MIMO), **changes)


@pytest.mark.parametrize("name", SHAPES)
def test_float32_logits_are_those_of_the_layers(name: str) -> None:
    """Of chunks, of single tokens, and of both in one step."""
    config, prompts, dtype = make_config(name), random_prompts(1, 17, 131, 200), torch.float32
    expected = run(make_model(config, dtype), config, dtype, prompts, 65)
    found = run(OnDevice(make_fused(config, dtype)), config, dtype, prompts, 65)
    assert all(logits.std() > 0.15 for logits in expected)
    assert furthest(found, expected) < 1e-4


@pytest.mark.parametrize("name", SHAPES)
def test_bfloat16_logits_are_as_near_to_float32_as_those_of_the_layers(name: str) -> None:
    """On average; other things are rounded, and not more."""
    config, prompts, dtype = make_config(name), random_prompts(1, 17, 130, 200), torch.bfloat16
    rounded = make_model(config, dtype).float()
    rounded.model.rotary = make_model(config, torch.float32).model.rotary
    exact = run(rounded, config, torch.float32, prompts, 300)
    layers = run(make_model(config, dtype), config, dtype, prompts, 300)
    found = run(OnDevice(make_fused(config, dtype)), config, dtype, prompts, 300)
    print(furthest(found, exact, Tensor.mean), furthest(layers, exact, Tensor.mean))
    assert furthest(found, exact, Tensor.mean) < 1.1 * furthest(layers, exact, Tensor.mean)


def test_drafts_are_those_of_the_layers() -> None:
    config, prompts, dtype = mimo_config(), random_prompts(1, 40), torch.float32
    caches = msgspec.structs.replace(config, num_hidden_layers=config.num_hidden_layers + 1)
    expected = run(Drafts(make_model(config, dtype)), caches, dtype, prompts, 13)
    found = run(OnDevice(Drafts(make_fused(config, dtype))), caches, dtype, prompts, 13)
    assert all(logits.std() > 0.15 for logits in expected)
    assert furthest(found, expected) < 1e-4


@pytest.mark.parametrize("name", SHAPES)
def test_weights_stay_where_they_are(name: str) -> None:
    model = make_model(make_config(name), torch.bfloat16)
    addresses = {parameter.data_ptr() for parameter in model.parameters()}
    fused = FusedLM(model)
    assert {parameter.data_ptr() for parameter in fused.parameters()} == addresses
    assert not fused.has_mtp
    assert FusedLM(make_model(mimo_config(), torch.bfloat16)).has_mtp


@pytest.mark.parametrize(("device", "dtype"), [("cpu", torch.float32), ("meta", torch.bfloat16)])
def test_only_a_cpu_has_a_wider_copy_of_the_head(device: str, dtype: torch.dtype) -> None:
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            embedding, head = empty_parameter(32, 8), LMHead(32, 8, "model.embed_tokens.weight")
    finally:
        torch.set_default_dtype(torch.float32)
    head.share(embedding)
    assert head.weight.dtype == dtype
    assert (head.weight is embedding) == (device != "cpu")
