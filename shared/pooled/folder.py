"""Pooling of a model, from its folder and the settings.

A sentence-transformers folder names the steps after the transformer in modules.json.
"""

import re
from pathlib import Path
from typing import Any, Literal

import msgspec

from shared.errors import ConfigError
from shared.model_folder import CONFIG_FILE, decode_json, find_file
from shared.settings.pooler import PoolerConfig, RunnerSetting
from shared.wire.messages import Activation, PoolingInfo, PoolingType

MODULES_FILE = "modules.json"
LENGTH_FILE = "sentence_bert_config.json"
CLASSIFIER = "ForSequenceClassification"
POOLING_TYPES: dict[str, PoolingType] = {"lasttoken": "last", "mean": "mean", "cls": "cls"}
MODULES = ("Transformer", "Pooling", "Normalize")
GEMMA = "Gemma3TextModel"  # EmbeddingGemma

_BERT = re.compile(rf"((Modern|Nomic)?Bert|(XLM)?Roberta)(Model|ForMaskedLM|{CLASSIFIER})")
_MODE = re.compile(r"pooling_mode_(\w+?)(_tokens?)?")


class _Module(msgspec.Struct):
    kind: str = msgspec.field(name="type")
    path: str = ""

    @property
    def name(self) -> str:
        return self.kind.rpartition(".")[2]


class _Length(msgspec.Struct):
    max_seq_length: int | None = None


class _Architectures(msgspec.Struct):
    architectures: list[str] | None = None

    @property
    def is_classifier(self) -> bool:
        return any(name.endswith(CLASSIFIER) for name in self.architectures or ())


class _Config(_Architectures):
    """Keys read for pooling models only; other models may use them differently."""

    hidden_size: int | None = None
    num_labels: int | None = None
    id2label: dict[int, str] | None = None
    problem_type: str | None = None
    sentence_transformers: dict[str, Any] = {}
    is_matryoshka: bool | None = None
    matryoshka_dimensions: list[int] | None = None
    classifier_pooling: Literal["cls", "mean"] = "cls"  # of ModernBERT's head

    @property
    def usual_type(self) -> PoolingType:
        return self.classifier_pooling if encodes(self.architectures) else "last"

    @property
    def labels(self) -> list[str]:
        """One label for each class of transformers' head."""
        if self.id2label:
            return [self.id2label[key] for key in sorted(self.id2label)]
        return [f"LABEL_{number}" for number in range(self.num_labels or 2)]


def read_pooling(folder: Path, runner: RunnerSetting, pooler: PoolerConfig) -> PoolingInfo | None:
    """None for a model that generates. Raises ConfigError naming an unsupported option."""
    path = find_file(folder, CONFIG_FILE)
    modules = _modules(folder)
    named = decode_json(path, _Architectures)
    is_classifier = named.is_classifier
    pools = bool(pooler) or is_classifier or any(each.name == "Pooling" for each in modules)
    pools |= encodes(named.architectures)
    if runner == "generate" and pooler:
        raise ConfigError("pooler-config: the model does not pool with runner = generate")
    if runner == "generate" or (runner == "auto" and not pools):
        return None
    config = decode_json(path, _Config)
    if is_classifier or pooler.classifier_from_token:
        return _classifier(config, pooler)
    return _embedder(folder, config, modules, pooler)


def encodes(architectures: list[str] | None) -> bool:
    return any(_BERT.fullmatch(name) or name == GEMMA for name in architectures or ())


def _classifier(config: _Config, pooler: PoolerConfig) -> PoolingInfo:
    names = pooler.classifier_from_token
    labels = config.labels if names is None else names[1:]
    return PoolingInfo(
        task="classify",
        pooling_type=_pooling_type(pooler) or config.usual_type,
        activation=_class_activation(config, pooler, len(labels)),
        size=len(labels),
        labels=labels,
    )


def _class_activation(config: _Config, pooler: PoolerConfig, num_labels: int) -> Activation:
    named = str(config.sentence_transformers.get("activation_fn", "")).rpartition(".")[2]
    is_plain = named == "Identity" or config.problem_type == "regression"
    if pooler.use_activation is False or (is_plain and not pooler.use_activation):
        return "none"
    is_multi = config.problem_type == "multi_label_classification"
    return "sigmoid" if num_labels == 1 or is_multi else "softmax"


def _embedder(
    folder: Path, config: _Config, modules: list[_Module], pooler: PoolerConfig
) -> PoolingInfo:
    if config.hidden_size is None:
        raise ConfigError(f"model: {folder / CONFIG_FILE} has no hidden_size")
    for module in modules:
        if module.name not in (*MODULES, "Dense" if encodes(config.architectures) else ""):
            raise ConfigError(
                f"model: {folder / MODULES_FILE}: the module {module.kind} is not supported;"
                f" supported are {', '.join(MODULES)}"
            )
    normalizes = not modules or any(each.name == "Normalize" for each in modules)
    if pooler.use_activation is not None:
        normalizes = pooler.use_activation
    dimensions = pooler.matryoshka_dimensions or config.matryoshka_dimensions or []
    is_matryoshka = config.is_matryoshka if pooler.is_matryoshka is None else pooler.is_matryoshka
    return PoolingInfo(
        task="embed",
        pooling_type=_pooling_type(pooler) or _pooling_type_of(folder, modules, config),
        activation="normalize" if normalizes else "none",
        size=config.hidden_size,
        is_matryoshka=bool(is_matryoshka),
        dimensions=[each for each in dimensions if each <= config.hidden_size],
    )


def _pooling_type(pooler: PoolerConfig) -> PoolingType | None:
    names: dict[str | None, PoolingType] = {"LAST": "last", "MEAN": "mean", "CLS": "cls"}
    return names.get(pooler.pooling_type)


def _pooling_type_of(folder: Path, modules: list[_Module], config: _Config) -> PoolingType:
    """The type in the module Pooling; without it the architecture's. Raises ConfigError."""
    paths = [folder / module.path / CONFIG_FILE for module in modules if module.name == "Pooling"]
    if not paths:
        return config.usual_type
    modes = _modes(paths[0])
    if len(modes) != 1 or modes[0] not in POOLING_TYPES:
        raise ConfigError(
            f"model: {paths[0]}: it pools by {' and '.join(modes) or 'nothing'}; supported is one"
            f" of {', '.join(POOLING_TYPES)} (or set pooling_type in pooler-config)"
        )
    return POOLING_TYPES[modes[0]]


def _modes(path: Path) -> list[str]:
    """The names of enabled modes, for example ``mean`` of ``pooling_mode_mean_tokens``."""
    try:
        found = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ConfigError(f"model: {path}: {error}") from None
    if isinstance(mode := found.get("pooling_mode"), str):
        return [mode]
    return [match[1] for key, value in found.items() if value and (match := _MODE.fullmatch(key))]


def _modules(folder: Path) -> list[_Module]:
    path = folder / MODULES_FILE
    if not path.is_file():
        return []
    try:
        return msgspec.json.decode(path.read_bytes(), type=list[_Module])
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ConfigError(f"model: {path}: {error}") from None


def max_length(folder: Path) -> int | None:
    """The longest text the model was trained for; None: its positions."""
    path = folder / LENGTH_FILE
    return decode_json(path, _Length).max_seq_length if path.is_file() else None
