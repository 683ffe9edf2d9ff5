"""The choice of KV cache codes: the requested ones, or the ones that the checkpoint is made for."""

import logging

import torch

from services.worker.config.model_config import ModelConfig
from services.worker.weights.schemes import find_scheme

log = logging.getLogger(__name__)

CACHE_CODES = {"none": None, "int8": torch.int8, "fp8": torch.uint8}


def choose_cache_dtype(setting: str, config: ModelConfig | None) -> str:
    """One of ``CACHE_CODES``. ``config`` is None if transformers computes the model. Raises
    ConfigError for an unreadable quantization_config, or one with other codes."""
    if setting != "auto":
        return setting
    if config is None or not config.quantization_config:
        return "none"
    found = find_scheme(config.quantization_config).cache_dtype()
    if found != "none":
        log.info("kv-cache-dtype: %s, as the checkpoint's kv_cache_scheme has it", found)
    return found
