"""Architectures we can run: the class's name in config.json, and its module."""

from importlib import import_module
from pathlib import Path

import msgspec

from services.worker.config.model_config import ModelConfig
from services.worker.models.decoder import DecoderLM
from shared.errors import ConfigError
from shared.model_folder import CONFIG_FILE, decode_json, find_file

MODELS = {
    "Ernie4_5ForCausalLM": "services.worker.models.ernie4_5",
    "Ernie4_5_MoeForCausalLM": "services.worker.models.ernie4_5_moe",
    "Glm4MoeForCausalLM": "services.worker.models.glm4_moe",
    "GraniteForCausalLM": "services.worker.models.granite",
    "LlamaForCausalLM": "services.worker.models.llama",
    "MiMoForCausalLM": "services.worker.models.mimo",
    "MistralForCausalLM": "services.worker.models.mistral",
    "MixtralForCausalLM": "services.worker.models.mixtral",
    "Olmo2ForCausalLM": "services.worker.models.olmo2",
    "Qwen2ForCausalLM": "services.worker.models.qwen2",
    "Qwen2MoeForCausalLM": "services.worker.models.qwen2_moe",
    "Qwen3ForCausalLM": "services.worker.models.qwen3",
    "Qwen3MoeForCausalLM": "services.worker.models.qwen3_moe",
}


class _Config(msgspec.Struct):
    architectures: list[str] = []


def read_architectures(folder: Path) -> list[str]:
    """Returns the names in config.json, of which nothing else is read: the config of an
    architecture that we do not know may lack the keys that we read. Raises ConfigError."""
    return decode_json(find_file(folder, CONFIG_FILE), _Config).architectures


def read_model_config(folder: Path) -> ModelConfig:
    """config.json, as the family reads it. Raises ConfigError where the architecture is none of
    ours, or the model needs what we cannot do."""
    path = find_file(folder, CONFIG_FILE)
    config = decode_json(path, find_model(read_architectures(folder)).Config)
    for problem in config.problems():
        raise ConfigError(f"model: {path}: {problem}")
    return config


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
