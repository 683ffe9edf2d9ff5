"""The config of a model that we compute ourselves, or the choice of transformers for it."""

import logging
from pathlib import Path

from services.worker.config.model_config import ModelConfig
from services.worker.models.registry import MODELS, find_model, read_model_config
from services.worker.startup.implementations import implementation
from shared.errors import ConfigError
from shared.pooling import encodes
from shared.settings.worker import WorkerConfig
from shared.wire.messages import ModelInfo

log = logging.getLogger(__name__)


def find_native_config(
    settings: WorkerConfig, folder: Path, model_info: ModelInfo, architectures: list[str]
) -> ModelConfig | None:
    """None if transformers computes the model. Raises ConfigError."""
    pools = model_info.pooling is not None
    by_transformers = _is_for_transformers(settings.model_impl, architectures)
    if pools and by_transformers and not encodes(architectures):
        raise ConfigError(f"runner: {'/'.join(architectures)} is no architecture that pools")
    if pools and settings.lm_head_quantization != "none":
        raise ConfigError(
            f"lm-head-quantization: {settings.lm_head_quantization}: a model that pools has no"
            " output head"
        )
    return None if by_transformers else _read_config(settings, folder, model_info)


def _is_for_transformers(wanted: str, architectures: list[str]) -> bool:
    """Logs it if ``auto`` chose transformers. Raises ConfigError if the architecture has to be ours
    and is not."""
    if wanted == "auto" and architectures and MODELS.keys().isdisjoint(architectures):
        log.info(
            "model-impl: %s is none of our own architectures: transformers computes it, slower and"
            " without MTP drafts",
            "/".join(architectures),
        )
        return True
    if wanted != "transformers":
        find_model(architectures)
    return wanted == "transformers"


def _read_config(settings: WorkerConfig, folder: Path, model_info: ModelInfo) -> ModelConfig:
    """Raises ConfigError, which names transformers if that would compute the model."""
    pools, max_len = model_info.pooling is not None, model_info.max_model_len
    try:
        config = read_model_config(folder, pools)
        return config if settings.reads_media else config.for_texts()
    except ConfigError as error:
        own = settings.quantization, settings.lm_head_quantization, settings.embedding_quantization
        for_our_own = set(own) != {"none"} or settings.cpu_offload_gb or pools
        if for_our_own or settings.speculative_config.method in ("mtp", "eagle3"):
            raise
        transformers = implementation("transformers")
        if transformers is None or not transformers.can_serve(folder, max_len):
            raise
        raise ConfigError(f"{error}; or use --model-impl transformers, which is slower") from None
