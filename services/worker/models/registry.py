"""Architectures we can run: the class's name in config.json, and its module."""

from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec

from services.worker.config.model_config import ModelConfig
from services.worker.gemma4.families import GEMMA4
from services.worker.hybrids.families import HYBRIDS
from services.worker.indexed.families import INDEXED
from services.worker.media.families import MEDIA
from services.worker.models.decoder import DecoderLM
from services.worker.models.families import Families
from shared.errors import ConfigError
from shared.model_folder import CONFIG_FILE, decode_json, find_file

INTERNVL = "InternVLForConditionalGeneration"
FAMILIES: tuple[Families, ...] = (
    GEMMA4,
    HYBRIDS,
    INDEXED,
    MEDIA,
)
MODELS = {
    "DeepseekV2ForCausalLM": "services.worker.models.deepseek",
    "DeepseekV3ForCausalLM": "services.worker.models.deepseek",
    "Ernie4_5ForCausalLM": "services.worker.models.ernie4_5",
    "Ernie4_5_ForCausalLM": "services.worker.models.ernie4_5",
    "Ernie4_5_MoeForCausalLM": "services.worker.models.ernie4_5",
    "Gemma2ForCausalLM": "services.worker.models.gemma",
    "Gemma3ForCausalLM": "services.worker.models.gemma",
    "Glm4MoeForCausalLM": "services.worker.models.glm4_moe",
    "GptOssForCausalLM": "services.worker.models.gpt_oss",
    "GraniteForCausalLM": "services.worker.models.granite",
    "KimiK25ForConditionalGeneration": "services.worker.models.deepseek",
    "Kimi_K25ForConditionalGeneration": "services.worker.models.deepseek",
    "LlamaForCausalLM": "services.worker.models.llama",
    "MiMoForCausalLM": "services.worker.models.mimo",
    "MistralForCausalLM": "services.worker.models.llama",
    "MixtralForCausalLM": "services.worker.models.mixtral",
    "Olmo2ForCausalLM": "services.worker.models.olmo2",
    "Qwen2ForCausalLM": "services.worker.models.qwen",
    "Qwen2MoeForCausalLM": "services.worker.models.qwen_moe",
    "Qwen3ForCausalLM": "services.worker.models.qwen",
    "Qwen3MoeForCausalLM": "services.worker.models.qwen_moe",
}
VIEWS: dict[str, str] = {}
for _each in FAMILIES:
    MODELS |= _each.models
    VIEWS |= _each.views

# Files next to config.json in which tools tell how weights are quantized, and their quant_method.
SIDE_FILES = {
    "hf_quant_config.json": "modelopt",
    "quant_config.json": "awq",
    "quantize_config.json": "gptq",
}
CAUSAL = "ForCausalLM"
# By model_type: texts of a wrapper that transformers computes; its class here has others.
TEXTS = {"ministral3": "Ministral3ForCausalLM", "mistral4": "Mistral4ForCausalLM"}
INTERNVL_TEXTS = {"gpt_oss": "GptOssForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM"}
# Replaces the suffix of a family's name if the model has another head, or none.
OTHER_HEADS = ("ForSequenceClassification", "Model")


class _Config(msgspec.Struct, omit_defaults=True):
    architectures: list[str] = []
    text_config: dict[str, Any] | None = None


class _Multimodal(_Config, omit_defaults=True):
    """The config of a model that reads images too. Keys next to ``text_config`` are for all its
    parts."""

    tie_word_embeddings: bool | None = None
    quantization_config: dict[str, Any] | None = None


def read_architectures(folder: Path, pools: bool = False) -> list[str]:
    """Returns the names in config.json and reads nothing else there: the config of an unknown
    architecture may lack our keys. If the model ``pools``, the names are the families' decoders,
    independent of its head. Raises ConfigError."""
    config = decode_json(find_file(folder, CONFIG_FILE), _Config)
    kind = str((config.text_config or {}).get("model_type"))
    texts = TEXTS | INTERNVL_TEXTS if INTERNVL in config.architectures else TEXTS
    names = [texts[kind]] if kind in texts else config.architectures
    return [_causal_name(name) for name in names] if pools else names


def _causal_name(name: str) -> str:
    decoders = (name.removesuffix(ending) + CAUSAL for ending in OTHER_HEADS)
    return next((each for each in decoders if each in MODELS), name)


def read_model_config(folder: Path, pools: bool = False) -> ModelConfig:
    """config.json, as the family reads it. Raises ConfigError if the architecture is not one of
    ours, or the model needs an unsupported feature."""
    path = find_file(folder, CONFIG_FILE)
    architectures = read_architectures(folder, pools)
    config = _decode_config(path, find_model(architectures).Config)
    quantization = config.quantization_config or read_side_file(folder)
    config = msgspec.structs.replace(
        config, architectures=architectures, quantization_config=quantization
    )
    for problem in config.problems():
        raise ConfigError(f"model: {path}: {problem}")
    return config


def read_side_file(folder: Path) -> dict[str, Any] | None:
    """The quantization_config that is next to config.json, if there is one. Raises ConfigError."""
    for name, method in SIDE_FILES.items():
        if (path := folder / name).is_file():
            return {"quant_method": method} | decode_json(path, dict[str, Any])
    return None


def _decode_config(path: Path, kind: type[ModelConfig]) -> ModelConfig:
    beside = msgspec.to_builtins(decode_json(path, _Multimodal))
    if "text_config" not in beside:
        return decode_json(path, kind)
    try:
        return msgspec.convert({"architectures": []} | beside.pop("text_config") | beside, kind)
    except msgspec.ValidationError as error:
        raise ConfigError(f"model: {path}: text_config: {error}") from None


def find_model(architectures: list[str]) -> type[DecoderLM]:
    """The class of the first architecture that we know. Raises ConfigError."""
    for name in architectures:
        if name in MODELS:
            model: type[DecoderLM] = getattr(import_module(MODELS[name]), name)
            return model
    raise ConfigError(
        f"model: architecture {', '.join(architectures) or 'missing'} is not supported;"
        f" supported are {', '.join(sorted(MODELS))}"
    )
