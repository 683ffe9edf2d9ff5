"""A model in steps with lengths known only to the device, compared with steps prepared by the
host."""

from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from kernels.cpu.library import variants
from services.worker.backends.torch_lm import TorchLM
from services.worker.config.model_config import ModelConfig
from services.worker.layers.embedding import Embedding, LMHead
from services.worker.layers.ops import Ops, X
from services.worker.models import CausalLM
from services.worker.models.mimo import MiMoForCausalLM, MiMoMtpHead
from tests.services.worker.device_contexts import OnDevice
from tests.services.worker.test_native import (
    SHAPES,
    furthest,
    make_config,
    make_model,
    make_native,
    random_prompts,
    run,
)

pytestmark = pytest.mark.usefixtures("_unwritten_memory")

MIMO = "Qwen2, biases"


class Drafts(CausalLM):
    """Makes the logits of a model's MTP head for a token and once more for its own output."""

    def __init__(self, model: CausalLM) -> None:
        super().__init__()
        assert model.draft_head is not None
        self.clears_blocks = model.clears_blocks
        self._model, self._head = model, model.draft_head

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        states = self._head.first_state(self._model(input_ids, positions))
        return self._head.forward(states, input_ids, positions)

    def logits(self, hidden: Tensor) -> Tensor:
        return self._head.logits(hidden).of_all


def mimo_config() -> ModelConfig:
    values = msgspec.structs.asdict(make_config(MIMO)) | {"architectures": ["MiMoForCausalLM"]}
    return MiMoForCausalLM.Config(**values, num_nextn_predict_layers=1)


@pytest.mark.parametrize("name", SHAPES)
def test_float32_logits_do_not_depend_on_the_side_that_knows_the_lengths(name: str) -> None:
    """Chunks, single tokens, and both in one step."""
    config, prompts, dtype = make_config(name), random_prompts(1, 17, 131, 200), torch.float32
    expected = run(TorchLM(make_model(config, dtype)), config, dtype, prompts, 65)
    found = run(OnDevice(TorchLM(make_model(config, dtype))), config, dtype, prompts, 65)
    assert all(logits.std() > 0.15 for logits in expected)
    assert furthest(found, expected) < 1e-4


@pytest.mark.parametrize("takes_normed", [False, True])
def test_drafts_do_not_depend_on_the_backend(
    takes_normed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if a head takes the trunk's states after the last norm, like DeepSeek's."""
    config, prompts, dtype = mimo_config(), random_prompts(1, 40), torch.float32
    caches = msgspec.structs.replace(config, num_hidden_layers=config.num_hidden_layers + 1)
    plain = run(Drafts(TorchLM(make_model(config, dtype))), caches, dtype, prompts, 13)
    if takes_normed:
        monkeypatch.setattr(MiMoMtpHead, "first_state", normed)
    expected = run(Drafts(TorchLM(make_model(config, dtype))), caches, dtype, prompts, 13)
    assert all(logits.std() > 0.15 for logits in expected)
    assert (furthest(expected, plain) > 0.01) == takes_normed
    on_device = OnDevice(Drafts(TorchLM(make_model(config, dtype))))
    native = Drafts(make_native(config, dtype, variants()[0], 16, 1))
    for model in (on_device, native):
        assert furthest(run(model, caches, dtype, prompts, 13), expected) < 1e-4


def normed(head: Any, ops: Ops[X], hidden: X) -> X:
    return ops.norm(hidden, head._trunk.norm)


@pytest.mark.parametrize("name", SHAPES)
def test_weights_stay_where_they_are(name: str) -> None:
    model = make_model(make_config(name), torch.bfloat16)
    addresses = {parameter.data_ptr() for parameter in model.parameters()}
    computed = TorchLM(model)
    assert {parameter.data_ptr() for parameter in computed.parameters()} == addresses
    assert computed.draft_head is None
    assert TorchLM(make_model(mimo_config(), torch.bfloat16)).draft_head is not None


@pytest.mark.parametrize(("device", "dtype"), [("cpu", torch.float32), ("meta", torch.bfloat16)])
def test_only_a_cpu_has_a_wider_copy_of_the_head(device: str, dtype: torch.dtype) -> None:
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            embedding = Embedding(32, 8, "embed_tokens.weight")
            head = LMHead(32, 8, "model.embed_tokens.weight", embedding)
    finally:
        torch.set_default_dtype(torch.float32)
    assert head.weight.values.dtype == dtype
    assert (head.weight is embedding.weight) == (device != "cpu")
