"""Encoders equal transformers, alone and in batches, for any division of prompts into chunks."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    BertForMaskedLM,
    BertForSequenceClassification,
    BertModel,
    Gemma3TextModel,
    ModernBertForSequenceClassification,
    ModernBertModel,
    NomicBertForSequenceClassification,
    NomicBertModel,
    PreTrainedModel,
    RobertaForMaskedLM,
    RobertaForSequenceClassification,
    XLMRobertaForSequenceClassification,
    XLMRobertaModel,
)

from benchmarks.harness import scheduled
from benchmarks.harness.engines import make_engine
from cli.exit_codes import OK
from cli.models.check_config import check_config
from cli.plan.command import main
from cli.plan.footprint import footprint_of
from services.worker.startup.plan_memory import weight_bytes
from shared.errors import ConfigError
from shared.settings.worker import WorkerConfig
from shared.wire.messages import Pooling, SamplingParams
from tests.encoder_models import (
    MAX_POSITIONS,
    class_logits,
    dense_of,
    pooled,
    random_texts,
    save_dense,
    save_encoder,
    save_modules,
    states_of,
)
from tests.services.worker.checkpoints import change_config

TOLERANCE = 1e-5
NEAR: dict[str, Any] = {"local_attention": 16, "global_attn_every_n_layers": 2}
PADDED: dict[str, Any] = {"pad_token_id": 1, "type_vocab_size": 1}
GEMMA: dict[str, Any] = {
    "use_bidirectional_attention": True,
    "sliding_window": 32,
    "sliding_window_pattern": 2,
    "head_dim": 16,
    "num_key_value_heads": 1,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
TRUNKS: list[tuple[type[PreTrainedModel], dict[str, Any]]] = [
    (BertModel, {}),
    (BertForMaskedLM, {}),
    (RobertaForMaskedLM, PADDED),
    (XLMRobertaModel, PADDED),
    (ModernBertModel, NEAR),
    (NomicBertModel, {}),
    (Gemma3TextModel, GEMMA),
]
HEADS: list[tuple[type[PreTrainedModel], dict[str, Any]]] = [
    (BertForSequenceClassification, {}),
    (RobertaForSequenceClassification, PADDED),
    (XLMRobertaForSequenceClassification, PADDED),
    (ModernBertForSequenceClassification, NEAR),
    (ModernBertForSequenceClassification, NEAR | {"classifier_pooling": "mean"}),
    (NomicBertForSequenceClassification, {}),
]


def pooled_params(**wanted: Any) -> SamplingParams:
    return SamplingParams(seed=0, max_tokens=0, pooling=Pooling(**wanted))


def run(engine: Any, texts: list[list[int]], params: Any, **options: Any) -> np.ndarray:
    done = scheduled.run(engine, texts, params, **options)
    assert done.ends == ["length"] * len(texts)
    assert done.num_hits == 0
    return np.stack([done.pooled[number] for number in range(len(texts))])


def name_of(value: Any) -> str:
    return getattr(value, "__name__", "")


@pytest.mark.parametrize("kernels", ["native", "device"])
@pytest.mark.parametrize(("family", "changes"), TRUNKS, ids=name_of)
def test_embeddings_match_transformers(
    tmp_path: Path, family: type[PreTrainedModel], changes: dict[str, Any], kernels: str
) -> None:
    """Native code, and transformers' operators."""
    save_encoder(tmp_path, family, **changes)
    save_modules(tmp_path, "mean_tokens", "Normalize")
    longest = MAX_POSITIONS - 2 * ("Roberta" in family.__name__)
    texts = [*random_texts(12, longest), random_texts(1, 2)[0], [5] * longest]
    states = states_of(tmp_path, texts)
    engine = make_engine(tmp_path, kernels, max_num_batched_tokens=64)
    assert engine.capacity.max_model_len == longest
    for mode in ("cls", "mean"):
        wanted = pooled(states, mode)
        params = pooled_params(pooling_type=mode, activation="normalize")
        found = run(engine, texts, params, caches_prefixes=True)
        assert np.abs(found - wanted).max() < TOLERANCE
        alone = np.concatenate([run(engine, [text], params) for text in texts[-3:]])
        assert np.abs(alone - wanted[-3:]).max() < TOLERANCE


@pytest.mark.parametrize(
    ("family", "changes", "pooling_type"),
    [
        *((*each, "mean") for each in TRUNKS),
        (BertForSequenceClassification, {"num_labels": 3}, "cls"),
    ],
    ids=name_of,
)
def test_a_prompt_has_the_same_bits_among_512(
    tmp_path: Path, family: type[PreTrainedModel], changes: dict[str, Any], pooling_type: str
) -> None:
    save_encoder(tmp_path, family, **changes)
    texts = random_texts(512, 80)
    engine = make_engine(tmp_path, "native", max_num_batched_tokens=512)
    assert engine._model._native is not None
    params = pooled_params(pooling_type=pooling_type, activation="normalize")
    together = run(engine, texts, params)
    if family.__name__.endswith("Model"):
        assert np.abs(together - pooled(states_of(tmp_path, texts), "mean")).max() < TOLERANCE
    some = range(0, len(texts), 37)
    alone = np.concatenate([run(engine, [texts[number]], params) for number in some])
    assert np.array_equal(alone, together[some])


@pytest.mark.parametrize("num_labels", [1, 3])
@pytest.mark.parametrize(("family", "changes"), HEADS, ids=name_of)
def test_logits_of_classes_match_transformers(
    tmp_path: Path, family: type[PreTrainedModel], changes: dict[str, Any], num_labels: int
) -> None:
    """A part of the texts are pairs, with token types of their own if the model has some."""
    save_encoder(tmp_path, family, num_labels=num_labels, **changes)
    engine = make_engine(tmp_path, "native", max_num_batched_tokens=64)
    assert engine.capacity.pooled_size == num_labels
    pooling = engine.model_info.pooling
    assert pooling.activation == ("sigmoid" if num_labels == 1 else "softmax")
    assert pooling.pooling_type == changes.get("classifier_pooling", "cls")
    has_types = changes.get("type_vocab_size") != 1 and family.__name__[:6] != "Modern"
    texts = random_texts(12, 90, seed=num_labels)
    nums = [number % len(text) // 2 for number, text in enumerate(texts)]
    types = (
        [[0] * (len(text) - num) + [1] * num for text, num in zip(texts, nums, strict=True)]
        if has_types
        else None
    )
    params = [pooled_params(pooling_type=pooling.pooling_type, num_second=num) for num in nums]
    found = run(engine, texts, params)
    assert np.abs(found - class_logits(tmp_path, texts, types)).max() < TOLERANCE


@pytest.mark.parametrize("kernels", ["native", "torch"])
@pytest.mark.parametrize("family", [BertModel, BertForSequenceClassification], ids=name_of)
def test_bfloat16_is_close(tmp_path: Path, family: type[PreTrainedModel], kernels: str) -> None:
    save_encoder(tmp_path, family, initializer_range=0.05)
    texts = random_texts(8, 90)
    wanted = pooled_params(pooling_type="cls", activation="normalize")
    exact, rounded = (
        run(make_engine(tmp_path, kernels, dtype=dtype), texts, wanted)
        for dtype in ("float32", "bfloat16")
    )
    assert 0 < np.abs(rounded - exact).max() < 0.05


def test_the_pooling_of_a_folder_without_modules_is_the_first_state(tmp_path: Path) -> None:
    save_encoder(tmp_path, BertModel)
    pooling = make_engine(tmp_path).model_info.pooling
    assert (pooling.pooling_type, pooling.activation) == ("cls", "normalize")


def test_the_length_of_sentence_transformers_is_the_longest_prompt(tmp_path: Path) -> None:
    save_encoder(tmp_path, XLMRobertaModel, **PADDED)
    save_modules(tmp_path, "cls_token", max_length=40)
    assert make_engine(tmp_path).capacity.max_model_len == 40
    with pytest.raises(ConfigError, match=r"max-model-len: 159 is more than .* = 158"):
        make_engine(tmp_path, max_model_len=159)


def test_dummy_weights_need_no_file(tmp_path: Path) -> None:
    save_encoder(tmp_path, BertForSequenceClassification)
    (tmp_path / "model.safetensors").unlink()
    engine = make_engine(tmp_path, load_format="dummy")
    assert run(engine, [[2, 3]], pooled_params(pooling_type="cls")).shape == (1, 2)
    with pytest.raises(ConfigError, match="model: transformers cannot serve it"):
        make_engine(tmp_path)


def test_refusals_name_their_reason(tmp_path: Path) -> None:
    save_encoder(tmp_path, BertModel)
    with pytest.raises(ConfigError, match="quantization: wint8 is for our own architectures"):
        make_engine(tmp_path, quantization="wint8")
    for pooler, reason in (
        ({"pooling_type": "LAST"}, "an encoder pools by CLS or MEAN"),
        ({"classifier_from_token": ["no", "sea"]}, "classifier_from_token is for models that"),
    ):
        with pytest.raises(ConfigError, match=reason):
            make_engine(tmp_path, pooler_config=pooler)
    change_config(tmp_path, num_hidden_layers=4)
    with pytest.raises(ConfigError, match=r"the folder lacks tensors.*encoder\.layer\.3"):
        make_engine(tmp_path)
    change_config(tmp_path, quantization_config={"quant_method": "gptq", "bits": 4})
    with pytest.raises(ConfigError, match="quantization_config"):
        make_engine(tmp_path)


@pytest.mark.parametrize(
    ("family", "changes", "reason"),
    [
        (BertModel, {"is_decoder": True}, "is_decoder is true"),
        (BertModel, {"position_embedding_type": "relative_key"}, "relative_key is not supported"),
        (
            NomicBertModel,
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e3, "factor": 2.0}},
            "rotations of type dynamic",
        ),
    ],
)
def test_configs_of_other_encoders_are_refused(
    tmp_path: Path, family: type[PreTrainedModel], changes: dict[str, Any], reason: str
) -> None:
    save_encoder(tmp_path, family)
    change_config(tmp_path, **changes)
    with pytest.raises(ConfigError, match=reason):
        make_engine(tmp_path)


def test_positions_that_begin_after_no_padding_id_are_refused(tmp_path: Path) -> None:
    save_encoder(tmp_path, XLMRobertaModel)
    config = json.loads((tmp_path / "config.json").read_text()) | {"pad_token_id": None}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="pad_token_id is null"):
        make_engine(tmp_path)


def test_dense_modules_follow_the_pooling(tmp_path: Path) -> None:
    save_encoder(tmp_path, Gemma3TextModel, **GEMMA)
    save_modules(tmp_path, "mean_tokens", "Dense", "Dense", "Normalize")
    save_dense(tmp_path, 2, 64, 96, "Tanh")
    save_dense(tmp_path, 3, 96, 64)
    texts = random_texts(8, 100)
    pooled = np.stack([each.mean(0).numpy() for each in states_of(tmp_path, texts)])
    expected = np.tanh(pooled @ dense_of(tmp_path, 2).T) @ dense_of(tmp_path, 3).T
    expected /= np.linalg.norm(expected, axis=-1, keepdims=True)
    wanted = pooled_params(pooling_type="mean", activation="normalize")
    found = run(make_engine(tmp_path), texts, wanted)
    assert np.abs(found - expected).max() < TOLERANCE
    for inputs, outputs, activation, reason in (
        (96, 64, "GELU", "activation_function is .*GELU; supported are Identity, Tanh"),
        (95, 64, "Tanh", "3_Dense: in_features is 95, not 96"),
        (96, 32, "Tanh", "3_Dense: out_features is 32; expected hidden_size, 64"),
    ):
        save_dense(tmp_path, 3, inputs, outputs, activation)
        with pytest.raises(ConfigError, match=reason):
            make_engine(tmp_path)
    save_dense(tmp_path, 3, 96, 64)
    (tmp_path / "3_Dense" / "model.safetensors").write_bytes(b"cut off")
    with pytest.raises(ConfigError, match=r"3_Dense/model\.safetensors: .*header"):
        make_engine(tmp_path)
    change_config(tmp_path, use_bidirectional_attention=False)
    with pytest.raises(ConfigError, match="without use_bidirectional_attention"):
        make_engine(tmp_path)


def test_a_plan_needs_the_config_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its sum of the weights is a worker's."""
    save_encoder(tmp_path, BertForSequenceClassification, num_labels=1, max_position_embeddings=512)
    settings = WorkerConfig(model=tmp_path, device="cpu", dtype="float32")
    engine = make_engine(tmp_path, "native")
    loaded = weight_bytes(engine._model)
    (tmp_path / "model.safetensors").rename(tmp_path / "weights.safetensors")
    assert footprint_of(settings, torch.device("cpu")).requirements.weights == loaded
    flags = ["--model", str(tmp_path), "--input-len", "40", "--output-len", "1"]
    assert main(flags) == OK
    text = " ".join(capsys.readouterr().out.split())
    assert "KV cache 0 bytes a token" in text
    assert "speed unknown" in text
    found = check_config(tmp_path)
    assert found.backend == "transformers"
    assert found.architecture == "BertForSequenceClassification"
