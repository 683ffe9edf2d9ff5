"""Loads an encoder of transformers."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModel, AutoModelForSequenceClassification, PreTrainedModel
from transformers.utils import logging as transformers_logging

from kernels.kv_layout import KVLayout
from services.worker.encoders.attention import ATTENTION
from services.worker.encoders.dense import read_dense
from services.worker.encoders.model import EncoderLM
from services.worker.machine.hardware import Memory
from services.worker.speculation.choose import NO_SPECULATION
from services.worker.startup.implementations import errors_as_config_errors
from services.worker.startup.loaded_model import LoadedModel, capacity_of
from services.worker.startup.model_shape import ModelShape, ParameterCount
from services.worker.startup.plan_memory import MemoryRequirements, estimate_requirements
from services.worker.step.sampler import TorchSampler
from shared.errors import ConfigError
from shared.foreign_config import read_foreign_config
from shared.pooled.folder import CLASSIFIER, GEMMA
from shared.settings.worker import WorkerConfig
from shared.wire.messages import EVERY_LAYER, Capacity, ModelInfo

transformers_logging.disable_progress_bar()
transformers_logging.set_verbosity_error()  # tensors that lack are refused

META = torch.device("meta")
SEED = 0
NOTHING = (2, 0, 0)  # no layer keeps keys and values
ABSOLUTE = "absolute"
POSITIONS = {ABSOLUTE, "rope", "rotary", None}
BY_LENGTH = {"dynamic", "longrope"}  # of the longest prompt of a step


def load(
    folder: Path,
    dtype: torch.dtype,
    device: torch.device,
    capacity: Capacity,
    is_dummy: bool,
    codes: torch.dtype | None,
) -> tuple[EncoderLM, ModelShape]:
    """``codes`` are of a KV cache, which an encoder does not have. Raises ConfigError."""
    config = _read_config(folder)
    with errors_as_config_errors():
        model = _dummy(config, dtype, device) if is_dummy else _pretrained(folder, config, dtype)
    model.eval().requires_grad_(requires_grad=False)
    model.config.use_cache = False
    max_tokens = max(capacity.max_num_batched_tokens, capacity.max_model_len)
    widest = 8 * config.hidden_size + 4 * config.intermediate_size
    shape = ModelShape(
        kv_layouts=[KVLayout(NOTHING, dtype)],
        numbers_per_token=-(-widest * max_tokens // capacity.max_num_batched_tokens),
        num_scored_heads=0,
        groups=EVERY_LAYER,
        layer_groups=(0,),
    )
    dense = read_dense(folder, config.hidden_size, is_dummy=is_dummy)
    encoder = EncoderLM(model, max_tokens, classifies=_classifies(config), dense=dense)
    return encoder.to(device), shape


def can_serve(folder: Path, max_model_len: int) -> bool:
    try:
        config = _read_config(folder)
        with errors_as_config_errors():
            _dummy(config, torch.float32, META)
    except ConfigError:
        return False
    return True


def requirements_of(
    settings: WorkerConfig, folder: Path, info: ModelInfo, dtype: torch.dtype, device: torch.device
) -> tuple[ParameterCount, MemoryRequirements]:
    """The memory of an encoder from its config alone. Raises ConfigError."""
    capacity = capacity_of(settings, info, device, NO_SPECULATION)
    model, shape = load(folder, dtype, META, capacity, is_dummy=True, codes=None)
    loaded = LoadedModel(
        *(settings, folder, info, shape, model, TorchSampler(), device, dtype, NO_SPECULATION),
        *(np.empty(0, np.int64), Memory(0, 0), None),
    )
    num = sum(each.numel() for each in model.parameters())
    return ParameterCount(num, num), estimate_requirements(loaded)


def _read_config(folder: Path) -> Any:
    config = read_foreign_config(folder)
    if getattr(config, "quantization_config", None):
        raise ConfigError("model: quantized weights (quantization_config) of an encoder")
    if getattr(config, "is_decoder", False):
        raise ConfigError("model: is_decoder is true: it is no encoder")
    if (kind := getattr(config, "position_embedding_type", ABSOLUTE)) not in POSITIONS:
        raise ConfigError(f"model: position_embedding_type {kind} is not supported")
    if kinds := _rope_types(config) & BY_LENGTH:
        raise ConfigError(f"model: rotations of type {', '.join(kinds)} depend on other prompts")
    is_one_sided = not getattr(config, "use_bidirectional_attention", None)
    if GEMMA in config.architectures and is_one_sided:
        raise ConfigError(f"model: {GEMMA} without use_bidirectional_attention is no encoder")
    return config


def _rope_types(config: Any) -> set[str]:
    """Of all layers, or by kinds of layers."""
    found = getattr(config, "rope_parameters", None) or {}
    each = [found, *(value for value in found.values() if isinstance(value, dict))]
    return {str(rope["rope_type"]) for rope in each if "rope_type" in rope}


def _classifies(config: Any) -> bool:
    return any(name.endswith(CLASSIFIER) for name in config.architectures)


def _kind(config: Any) -> Any:
    return AutoModelForSequenceClassification if _classifies(config) else AutoModel


def _dummy(config: Any, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    with torch.random.fork_rng(devices=[]), device:
        torch.manual_seed(SEED)
        model: PreTrainedModel = _kind(config).from_config(
            config, dtype=dtype, attn_implementation=ATTENTION, trust_remote_code=False
        )
    return model


def _pretrained(folder: Path, config: Any, dtype: torch.dtype) -> PreTrainedModel:
    """Only whole checkpoints in safetensors. Embeddings do without the head ``pooler``."""
    model, info = _kind(config).from_pretrained(
        folder,
        dtype=dtype,
        attn_implementation=ATTENTION,
        local_files_only=True,
        trust_remote_code=False,
        use_safetensors=True,
        output_loading_info=True,
    )
    missing = [name for name in info["missing_keys"] if not name.startswith("pooler.")]
    if lacking := [*missing, *(str(key) for key in info["mismatched_keys"])]:
        raise ConfigError(f"the folder lacks tensors, or has others: {', '.join(sorted(lacking))}")
    found: PreTrainedModel = model
    return found
