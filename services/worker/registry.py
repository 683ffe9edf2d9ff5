"""Architectures we can run: the class's name in config.json, and the module it lies in."""

from importlib import import_module

from services.worker.model_config import ModelConfig
from services.worker.models import CausalLM
from shared.errors import ConfigError

MODELS = {
    "Ernie4_5ForCausalLM": "services.worker.models.ernie4_5",
    "LlamaForCausalLM": "services.worker.models.llama",
    "MiMoForCausalLM": "services.worker.models.mimo",
    "Qwen2ForCausalLM": "services.worker.models.qwen2",
    "Qwen3ForCausalLM": "services.worker.models.qwen3",
}


def find_model(config: ModelConfig) -> type[CausalLM]:
    """The class of the first architecture that we know. Raises ConfigError."""
    for name in config.architectures:
        if name in MODELS:
            model: type[CausalLM] = getattr(import_module(MODELS[name]), name)
            return model
    raise ConfigError(
        f"model: architecture {', '.join(config.architectures) or 'missing'} is not supported;"
        f" supported are {', '.join(sorted(MODELS))}"
    )
