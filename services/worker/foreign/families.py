"""The class of transformers that computes the texts of a configuration."""

from typing import Any

from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    PreTrainedModel,
)

from services.worker.startup.implementations import errors_as_config_errors
from shared.errors import ConfigError

TEXT = "language_model"


def text_trunk(model: PreTrainedModel) -> Any:
    """The layers that compute texts, with embeddings and the last norm."""
    trunk = getattr(model, model.base_model_prefix)
    return getattr(trunk, TEXT, trunk)


def find_family(config: Any) -> tuple[type[PreTrainedModel], Any]:
    """The class, and the configuration for it. A model that reads images is taken without the parts
    for them. Raises ConfigError if transformers has no decoder, or one with other attention."""
    name = "/".join(config.architectures or [type(config).__name__])
    with errors_as_config_errors():  # of the module that has the class
        family: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
        if family is None:
            config = _with_images(config)
            family = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING.get(type(config), None)
            family = None if family is None else _texts_of(family)
    if family is None:
        raise ConfigError(
            f"model: {name}: transformers does not load it as a decoder (AutoModelForCausalLM,"
            " AutoModelForImageTextToText)"
        )
    if not family._supports_attention_backend:
        raise ConfigError(f"model: {name} does not use transformers' attention interface")
    if family.config_class is config.sub_configs.get("text_config"):
        return family, config.get_text_config()
    return family, config


def _with_images(config: Any) -> Any:
    """The configuration of a model with images for the one of its texts alone: Step 3.5, for
    example, is the text part of Step 3.7."""
    kind: Any
    for kind in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        if kind.sub_configs.get("text_config") is type(config):
            return kind(text_config=config, architectures=config.architectures)
    return config


def _texts_of(family: Any) -> Any:
    def make(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        family.__init__(self, config, *args, **kwargs)
        trunk = getattr(self, family.base_model_prefix)
        if hasattr(trunk, TEXT):
            for name in [name for name, _ in trunk.named_children() if name != TEXT]:
                delattr(trunk, name)

    unread = rf"^{family.base_model_prefix}\.(?!{TEXT}\.)"
    attributes = {
        "__init__": make,
        "__module__": family.__module__,
        "_keys_to_ignore_on_load_unexpected": [
            *(family._keys_to_ignore_on_load_unexpected or ()),
            unread,
        ],
    }
    return type(family.__name__, (family,), attributes)


def of_texts(name: str) -> dict[str, str]:
    """Parts for images keep their attention."""
    return {"": name, "text_config": name}
