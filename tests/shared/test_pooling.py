"""Pooling by folder and settings."""

import json
from pathlib import Path
from typing import Any

import pytest

from shared.errors import ConfigError
from shared.model_folder import EMBEDDED_MODEL
from shared.pooling import read_pooling, read_served_model
from shared.settings.load import load_settings
from shared.settings.pooler import PoolerConfig
from shared.settings.worker import WorkerConfig
from shared.wire.messages import PoolingInfo

TYPE = "sentence_transformers.models."


def make_folder(folder: Path, *modules: str, **config: Any) -> Path:
    """``modules`` follow the transformer, with the enabled modes of the module Pooling."""
    shape = {"vocab_size": 99, "max_position_embeddings": 512, "hidden_size": 32}
    values = shape | {"architectures": ["Qwen3ForCausalLM"]} | config
    (folder / "config.json").write_text(json.dumps(values))
    if not modules:
        return folder
    listed = [{"path": "", "type": f"{TYPE}Transformer"}]
    for module in modules:
        name, _, mode = module.partition(":")
        listed.append({"path": name, "type": f"{TYPE}{name}"})
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps({f"pooling_mode_{mode}": True}))
    (folder / "modules.json").write_text(json.dumps(listed))
    return folder


@pytest.mark.parametrize(
    ("modules", "settings", "expected"),
    [
        (["Pooling:lasttoken", "Normalize"], {}, ("last", "normalize")),
        (["Pooling:mean_tokens"], {}, ("mean", "none")),
        (["Pooling:cls_token", "Normalize"], {"use_activation": False}, ("cls", "none")),
        (["Pooling:max_tokens"], {"pooling_type": "MEAN"}, ("mean", "none")),
        ([], {"pooling_type": "LAST"}, ("last", "normalize")),
    ],
)
def test_a_folder_of_sentence_transformers_says_how_it_pools(
    modules: list[str], settings: dict[str, Any], expected: tuple[str, str], tmp_path: Path
) -> None:
    found = read_pooling(make_folder(tmp_path, *modules), "auto", PoolerConfig(**settings))
    assert found is not None
    assert (found.task, found.size) == ("embed", 32)
    assert (found.pooling_type, found.activation) == expected


def test_a_decoder_writes_texts_unless_the_runner_says_otherwise(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    assert read_pooling(folder, "auto", PoolerConfig()) is None
    assert read_pooling(folder, "pooling", PoolerConfig()) == PoolingInfo(
        "embed", "last", "normalize", 32
    )
    model = read_served_model(EMBEDDED_MODEL, [], None)
    assert (model.runner, model.pooling) == ("generate", None)


def test_the_longest_text_of_sentence_transformers_is_the_default_only(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, "Pooling:lasttoken")
    (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 128}')
    assert read_served_model(folder, [], None).max_model_len == 128
    assert read_served_model(folder, [], 300).max_model_len == 300
    assert read_served_model(folder, [], None, "generate").max_model_len == 512


@pytest.mark.parametrize(
    ("config", "settings", "expected"),
    [
        ({"num_labels": 1}, {}, ("sigmoid", ["LABEL_0"])),
        ({"id2label": {"1": "b", "0": "a"}}, {}, ("softmax", ["a", "b"])),
        ({"id2label": {"0": "a"}, "problem_type": "regression"}, {}, ("none", ["a"])),
        ({"num_labels": 3, "problem_type": "multi_label_classification"}, {}, ("sigmoid", None)),
        ({"num_labels": 1}, {"use_activation": False}, ("none", ["LABEL_0"])),
        (
            {
                "num_labels": 1,
                "sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"},
            },
            {},
            ("none", ["LABEL_0"]),
        ),
    ],
)
def test_a_classifier_has_labels_and_an_activation(
    config: dict[str, Any], settings: dict[str, Any], expected: Any, tmp_path: Path
) -> None:
    folder = make_folder(tmp_path, architectures=["Qwen3ForSequenceClassification"], **config)
    found = read_pooling(folder, "auto", PoolerConfig(**settings))
    assert found is not None
    assert (found.task, found.activation, found.size) == (
        "classify",
        expected[0],
        len(found.labels),
    )
    assert expected[1] in (None, found.labels)


def test_labels_without_numbers_are_refused(tmp_path: Path) -> None:
    names = {"architectures": ["Qwen3ForSequenceClassification"], "id2label": {"good": "a"}}
    with pytest.raises(ConfigError, match=r"config\.json: Expected `int`, got `str`.*id2label"):
        read_pooling(make_folder(tmp_path, **names), "auto", PoolerConfig())


def test_two_tokens_make_a_model_of_scores(tmp_path: Path) -> None:
    pooler = PoolerConfig(classifier_from_token=["no", "yes"])
    found = read_pooling(make_folder(tmp_path), "auto", pooler)
    assert found == PoolingInfo("classify", "last", "sigmoid", 1, ["yes"])


@pytest.mark.parametrize(
    ("modules", "settings", "message"),
    [
        (["Pooling:mean_sqrt_len_tokens"], {}, "it pools by mean_sqrt_len; supported is one of"),
        (["Pooling:lasttoken", "Dense"], {}, "module sentence_transformers.models.Dense is not"),
        (["Pooling:lasttoken"], {"runner": "generate"}, "pooler-config: the model does not pool"),
    ],
)
def test_unsupported_pooling_is_refused_by_name(
    modules: list[str], settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    folder = make_folder(tmp_path, *modules)
    runner = settings.get("runner", "auto")
    pooler = PoolerConfig(pooling_type="LAST") if runner == "generate" else PoolerConfig()
    with pytest.raises(ConfigError, match=message):
        read_pooling(folder, runner, pooler)


def test_the_setting_is_json_and_wrong_keys_are_named() -> None:
    text = '{"pooling_type": "MEAN", "matryoshka_dimensions": [8, 16]}'
    found = load_settings(WorkerConfig, [f"--pooler-config={text}"], "test").pooler_config
    assert found == PoolerConfig(pooling_type="MEAN", matryoshka_dimensions=[8, 16])
    for wrong, message in (
        ('{"pooling": "MEAN"}', "no such key; known keys: pooling_type"),
        ('{"pooling_type": "mean"}', "pooling_type: must be 'LAST', 'MEAN' or 'CLS'"),
        ("MEAN", 'such as {"pooling_type": "MEAN"}'),
    ):
        with pytest.raises(ConfigError) as error:
            load_settings(WorkerConfig, [f"--pooler-config={wrong}"], "test")
        assert message in str(error.value)
