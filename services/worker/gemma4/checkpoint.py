"""Checkpoints of Gemma 4: experts are stored in one tensor, or one by one if they are quantized.
Published files of E2B and E4B hold keys and values of all layers, also of layers that read those of
another one."""

import re

from services.worker.config.model_config import ModelConfig
from services.worker.gemma4.config import Gemma4Config
from services.worker.weights.checkpoint import Checkpoint
from services.worker.weights.stacked_experts import QWEN3_5, StackedExperts

OF_KEYS = re.compile(r".*\.layers\.(?P<layer>\d+)\.self_attn\.(?:k_proj|v_proj|k_norm)\..+")


def view(checkpoint: Checkpoint, config: ModelConfig) -> Checkpoint:
    """``checkpoint`` by our names, with the tensors that are read."""
    assert isinstance(config, Gemma4Config)
    found = StackedExperts(checkpoint, QWEN3_5)
    found.tensors = {
        name: each
        for name, each in checkpoint.tensors.items()
        if not _is_unread(name, config.num_own)
    }
    return found


def _is_unread(name: str, num_own: int) -> bool:
    found = OF_KEYS.fullmatch(name)
    return found is not None and int(found["layer"]) >= num_own
