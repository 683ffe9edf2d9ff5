"""Assistant models that do not fit are refused by name."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from benchmarks.harness.engines import make_engine
from cli.plan.footprint import footprint_of
from shared.errors import ConfigError
from shared.settings.worker import WorkerConfig
from tests.services.worker.assistant.checkpoints import (
    CLUSTERS,
    HIDDEN,
    NUM_CLUSTERS,
    OF_HEADS,
    OWN,
    change_keys,
    change_tensors,
    save_assistant,
    save_target,
)
from tests.services.worker.checkpoints import VOCAB_SIZE, save_model
from tests.services.worker.gemma4 import FULL, SLIDING, WINDOW


def refusal(model: Path, assistant: Path, **more: Any) -> str:
    settings = {key: more.pop(key) for key in list(more) if not key.startswith("draft")}
    speculation = {"method": "mtp", "model": str(assistant)} | more
    with pytest.raises(ConfigError) as error:
        make_engine(model, speculative_config=speculation, **settings)
    return str(error.value)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With an assistant in each of two folders."""
    folder = tmp_path_factory.mktemp("model")
    save_target(folder)
    save_assistant(folder / "assistant")
    save_assistant(folder / "clusters", **CLUSTERS)
    return folder


@pytest.mark.parametrize(
    ("layers", "changes", "message"),
    [
        ({}, {"model_type": "gemma4"}, "model_type 'gemma4' is no assistant of a Gemma 4; gemma4_"),
        ({}, {"model_type": None}, "model_type None is no assistant of a Gemma 4; gemma4_"),
        ({}, {"text_config": []}, "text_config is no object"),
        ({}, {"backbone_hidden_size": None}, "missing required field `backbone_hidden_size`"),
        (
            {},
            {"backbone_hidden_size": 96},
            f"backbone_hidden_size 96 is another than the model's hidden_size, {HIDDEN}",
        ),
        ({}, {"tie_word_embeddings": False}, "tie_word_embeddings false is not supported"),
        ({}, {"quantization_config": {"quant_method": "fp8"}}, "quantization_config is not"),
        (
            {},
            CLUSTERS | {"num_centroids": 7},
            f"num_centroids 7 does not divide vocab_size {VOCAB_SIZE}",
        ),
        (
            {},
            CLUSTERS | {"centroid_intermediate_top_k": 21},
            f"centroid_intermediate_top_k 21 is above num_centroids {NUM_CLUSTERS}",
        ),
        ({"vocab_size": 99}, {}, f"vocab_size 99 is another than the model's, {VOCAB_SIZE}"),
        ({"head_dim": 32}, {}, f"head_dim 32 of {SLIDING} is another than the model's, 16"),
        (
            OF_HEADS | {"global_head_dim": 64},
            {},
            f"head_dim 64 of {FULL} is another than the model's, 32",
        ),
        ({"num_key_value_heads": 1}, {}, f"KV heads 1 of {SLIDING} is another than the model's, 2"),
        ({"sliding_window": 9}, {}, f"sliding_window 9 is another than the model's, {WINDOW}"),
        ({"hidden_size_per_layer_input": 8}, {}, "hidden_size_per_layer_input 8 is not supported"),
        ({"enable_moe_block": True}, {}, "enable_moe_block True is not supported"),
        ({"use_double_wide_mlp": True}, {}, "use_double_wide_mlp True is not supported"),
        ({"num_kv_shared_layers": 1}, {}, "num_kv_shared_layers 1 is not num_hidden_layers, 3"),
        ({"hidden_activation": "silu"}, {}, "hidden_activation 'silu' is not supported"),
    ],
    ids=str,
)
def test_a_config_that_does_not_fit(
    model: Path, tmp_path: Path, layers: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    save_assistant(tmp_path)
    change_keys(tmp_path, layers, changes)
    found = refusal(model, tmp_path)
    assert found.startswith(f"speculative-config: model: {tmp_path}/config.json: ")
    assert message in found


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pre_projection.weight": None}, "lacks tensors pre_projection.weight"),
        ({"model.layers.2.layer_scalar": None}, "lacks tensors model.layers.2.layer_scalar"),
        ({"model.embed_tokens.weight": None}, "lacks tensors model.embed_tokens.weight"),
        ({"masked_embedding.token_ordering": None}, "lacks tensors masked_embedding.token_order"),
        (
            {"masked_embedding.token_ordering": torch.zeros(5).long()},
            f"[5]; vocab_size is {VOCAB_SIZE}",
        ),
        (
            {"masked_embedding.token_ordering": torch.zeros(VOCAB_SIZE).long()},
            f"token_ordering does not have each id between 0 and {VOCAB_SIZE - 1} once",
        ),
        ({"post_projection.weight": torch.zeros(OWN, HIDDEN)}, "torch.float32 [32, 64]; the arch"),
        (
            {"model.layers.0.self_attn.k_proj.weight": torch.zeros(32, OWN)},
            "the architecture has no tensor model.layers.0.self_attn.k_proj.weight",
        ),
    ],
    ids=str,
)
def test_tensors_that_do_not_fit(
    model: Path, tmp_path: Path, changes: dict[str, Tensor | None], message: str
) -> None:
    save_assistant(tmp_path, **CLUSTERS)
    change_tensors(tmp_path, changes)
    found = refusal(model, tmp_path)
    assert found.startswith("speculative-config: model: ")
    assert message in found


def test_a_kind_of_layers_that_the_model_lacks(tmp_path: Path) -> None:
    save_target(tmp_path, layer_types=[FULL] * 4)
    save_assistant(tmp_path / "assistant")
    found = refusal(tmp_path, tmp_path / "assistant")
    assert f"layer_types: the model has no keys and values of the kind {SLIDING}" in found


@pytest.mark.parametrize("key", ["tensor_parallel_size", "pipeline_parallel_size"])
def test_several_ranks(model: Path, key: str) -> None:
    found = refusal(model, model / "assistant", **{key: 2})
    assert found == (
        f"speculative-config: method mtp: {key.replace('_', '-')} 2 is not supported; only 1 is"
    )


def test_gpus(model: Path) -> None:
    speculation = {"method": "mtp", "model": str(model / "assistant")}
    settings = WorkerConfig(model=model, speculative_config=speculation)
    with pytest.raises(ConfigError, match="method mtp: an assistant is not supported on GPUs"):
        footprint_of(settings, torch.device("cuda"))


def test_some_tokens_only(model: Path) -> None:
    speculation = {"method": "mtp", "model": str(model / "assistant"), "draft_vocab_size": 9}
    make_engine(model, speculative_config=speculation)
    found = refusal(model, model / "clusters", draft_vocab_size=9)
    assert "draft_vocab_…: not for an assistant with use_ordered_embeddings" in found


def test_a_folder_that_is_not_there(model: Path, tmp_path: Path) -> None:
    found = refusal(model, tmp_path / "none")
    assert found.startswith(f"speculative-config: model: no such folder: {tmp_path}/none")


def test_a_model_of_another_family(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Other servers name the model itself with the method; here it has no head."""
    caplog.set_level(logging.WARNING)
    save_model(tmp_path, LlamaForCausalLM)
    found = refusal(tmp_path, tmp_path)
    assert found == "speculative-config: method mtp: the model has no MTP head"
    assert "model has no effect: only a Gemma 4 has an assistant" in caplog.text
