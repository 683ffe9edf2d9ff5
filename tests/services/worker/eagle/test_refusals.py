"""EAGLE-3 heads that do not fit are refused by name."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Gemma2ForCausalLM, LlamaForCausalLM, PhiForCausalLM, PreTrainedModel

from benchmarks.harness.engines import make_engine
from shared.errors import ConfigError
from tests.services.worker.checkpoints import VOCAB_SIZE, save_model
from tests.services.worker.eagle.checkpoints import DRAFTED, HIDDEN, change_tensors, save_head


def refusal(model: Path, head: Path, **settings: Any) -> str:
    speculation = {"method": "eagle3", "model": str(head)}
    with pytest.raises(ConfigError) as error:
        make_engine(model, speculative_config=speculation, **settings)
    return str(error.value)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_model(folder, LlamaForCausalLM)
    return folder


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 32}, f"hidden_size 32 is another than the model's, {HIDDEN}"),
        ({"vocab_size": 999}, f"vocab_size 999 is another than the model's, {VOCAB_SIZE}"),
        ({"target_hidden_size": 96}, "target_hidden_size 96 is another than the model's hidden_s"),
        ({"num_hidden_layers": 2}, "num_hidden_layers 2 is not supported; only 1 is"),
        ({"draft_vocab_size": 0}, "draft_vocab_size 0 is not from 1 to vocab_size"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ({"fc_norm": True}, "fc_norm true is not supported"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config is not supported"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state false is not"),
        ({"eagle_aux_hidden_state_layer_ids": [0, 1, 1]}, "[0, 1, 1] are not those of different"),
        ({"eagle_aux_hidden_state_layer_ids": [0, 1, 3]}, "different layers from 0 to 2"),
        ({"rms_norm_eps": None}, "missing required field `rms_norm_eps`"),
    ],
)
def test_a_config_that_does_not_fit(
    model: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    save_head(tmp_path, **changes)
    found = refusal(model, tmp_path)
    assert found.startswith(f"speculative-config: model: {tmp_path}/config.json: ")
    assert message in found


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"fc__weight": None}, "lacks tensors fc.weight"),
        ({"midlayer__hidden_norm__weight": None}, "lacks tensors midlayer.hidden_norm.weight"),
        ({"lm_head__weight": None}, "lacks tensors lm_head.weight"),
        ({"d2t": None}, "lacks tensors d2t"),
        ({"d2t": torch.zeros(5).long()}, f"[5]; the draft_vocab_size is {DRAFTED}"),
        ({"d2t": -torch.arange(DRAFTED)}, f"d2t does not lead to {DRAFTED} different ids"),
        ({"fc__weight": torch.zeros(HIDDEN, 2 * HIDDEN)}, "fc.weight is torch.float32 [64, 128]"),
        ({"mask_hidden": torch.zeros(HIDDEN)}, "the architecture has no tensor mask_hidden"),
    ],
)
def test_tensors_that_do_not_fit(
    model: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    save_head(tmp_path)
    change_tensors(tmp_path, **changes)
    found = refusal(model, tmp_path)
    assert found.startswith("speculative-config: model: ")
    assert message in found


@pytest.mark.parametrize("key", ["tensor_parallel_size", "pipeline_parallel_size"])
def test_several_ranks(model: Path, tmp_path: Path, key: str) -> None:
    save_head(tmp_path)
    found = refusal(model, tmp_path, **{key: 2})
    assert found == (
        f"speculative-config: method eagle3: {key.replace('_', '-')} 2 is not supported; only 1 is"
    )


@pytest.mark.parametrize(
    ("family", "message"),
    [
        (Gemma2ForCausalLM, "architecture Gemma2ForCausalLM is not supported"),
        (PhiForCausalLM, "transformers computes the model; it must be one of our own"),
    ],
)
def test_other_families(tmp_path: Path, family: type[PreTrainedModel], message: str) -> None:
    save_model(tmp_path, family)
    save_head(tmp_path / "head")
    found = refusal(tmp_path, tmp_path / "head")
    assert found == f"speculative-config: method eagle3: {message}"


def test_a_folder_that_is_not_there(model: Path, tmp_path: Path) -> None:
    found = refusal(model, tmp_path / "none")
    assert found.startswith(f"speculative-config: model: no such folder: {tmp_path}/none")
