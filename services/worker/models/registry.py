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
    "LlamaForCausalLM": "services.worker.models.llama",
    "MiMoForCausalLM": "services.worker.models.mimo",
    "Qwen2ForCausalLM": "services.worker.models.qwen2",
    "Qwen3ForCausalLM": "services.worker.models.qwen3",
}


class _Config(msgspec.Struct):
    architectures: list[str] = []


def read_architectures(folder: Path) -> list[str]:
    """Returns the names in config.json, of which nothing else is read: the config of an
    architecture that we do not know may lack the keys that we read. Raises ConfigError."""
    return decode_json(find_file(folder, CONFIG_FILE), _Config).architectures


def check_architecture(names: list[str]) -> None:
    """Raises ConfigError where we know none of ``names``."""
    _find_name(names)


def find_model(config: ModelConfig) -> type[DecoderLM]:
    """The class of the first architecture that we know. Raises ConfigError."""
    name = _find_name(config.architectures)
    model: type[DecoderLM] = getattr(import_module(MODELS[name]), name)
    return model


def _find_name(architectures: list[str]) -> str:
    for name in architectures:
        if name in MODELS:
            return name
    raise ConfigError(
        f"model: architecture {', '.join(architectures) or 'missing'} is not supported;"
        f" supported are {', '.join(sorted(MODELS))}"
    )
