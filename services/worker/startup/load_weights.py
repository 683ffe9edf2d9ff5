"""Loads the weights of a model as the settings want them, for our own code or for transformers."""

from pathlib import Path

import torch

from services.worker.config.model_config import ModelConfig
from services.worker.layers.parallel import Parallel
from services.worker.models import CausalLM
from services.worker.models.decoder import DecoderLM
from services.worker.startup.cache_codes import CACHE_CODES
from services.worker.startup.implementations import implementation
from services.worker.startup.model_shape import ModelShape
from services.worker.weights.dummy import make_dummy
from services.worker.weights.load import build_model, load_model
from services.worker.weights.progress import Progress
from services.worker.weights.weight_placement import GIB
from shared.errors import ConfigError
from shared.settings.worker import WorkerConfig
from shared.wire.messages import Capacity

FOR_OUR_OWN = " is for our own architectures; transformers computes this model"


def load_ours(
    settings: WorkerConfig,
    folder: Path,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    progress: Progress,
    pools: bool,
    parallel: Parallel,
) -> DecoderLM:
    codes = CACHE_CODES[settings.kv_cache_dtype]
    # Before anything is read: refuses what the model or its device does not support.
    planned = build_model(config, dtype, torch.device("meta"))
    planned.kv_layouts(dtype, drafts=False, codes=codes)
    host_bytes = int(settings.cpu_offload_gb * GIB)
    if settings.load_format == "dummy":
        return make_dummy(
            *(config, dtype, device, settings.quantization, host_bytes),
            head=settings.lm_head_quantization,
            embedding=settings.embedding_quantization,
            pools=pools,
            parallel=parallel,
        )
    return load_model(
        *(folder, config, dtype, device, progress, parallel),
        quantization=settings.quantization,
        cache=settings.quantization_cache,
        host_bytes=host_bytes,
        head=settings.lm_head_quantization,
        embedding=settings.embedding_quantization,
        pools=pools,
    )


def load_theirs(
    settings: WorkerConfig,
    folder: Path,
    dtype: torch.dtype,
    device: torch.device,
    capacity: Capacity,
) -> tuple[CausalLM, ModelShape]:
    """A model that pools is an encoder. Raises ConfigError."""
    for key in ("quantization", "lm_head_quantization", "embedding_quantization"):
        if (form := getattr(settings, key)) != "none":
            raise ConfigError(f"{key.replace('_', '-')}: {form}{FOR_OUR_OWN}")
    if settings.cpu_offload_gb:
        raise ConfigError(f"cpu-offload-gb: {settings.cpu_offload_gb:g}{FOR_OUR_OWN}")
    if settings.enable_expert_distribution_metrics:
        raise ConfigError(f"enable-expert-distribution-metrics{FOR_OUR_OWN}")
    theirs = implementation("encoders" if capacity.pooled_size else "transformers")
    if theirs is None:
        raise ConfigError("model-impl: transformers is not a part of this installation")
    codes = CACHE_CODES[settings.kv_cache_dtype]
    is_dummy = settings.load_format == "dummy"
    return theirs.load(folder, dtype, device, capacity, is_dummy, codes)
