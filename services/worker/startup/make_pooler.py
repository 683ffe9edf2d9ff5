"""Makes what pools of a model that does: the head of its classes is read, or made up."""

import logging
from pathlib import Path

import torch

from services.worker.models import CausalLM
from services.worker.models.decoder import DecoderLM
from services.worker.step.pooling import Pooler
from services.worker.weights.pooled import make_up_score_head, read_score_head
from shared.errors import ConfigError
from shared.settings.worker import WorkerConfig
from shared.wire.messages import ModelInfo

log = logging.getLogger(__name__)


def make_pooler(
    settings: WorkerConfig,
    folder: Path,
    model_info: ModelInfo,
    model: DecoderLM | CausalLM,
    computed: CausalLM,
    device: torch.device,
) -> Pooler | None:
    """Raises ConfigError."""
    pooling = model_info.pooling
    if pooling is None or not isinstance(model, DecoderLM):
        return None
    head, hidden_size = None, model.config.hidden_size
    if pooling.task == "classify" and settings.load_format == "dummy":
        head = make_up_score_head(pooling.size, hidden_size)
    elif pooling.task == "classify":
        tokens = settings.pooler_config.classifier_from_token
        if tokens is not None and model.logits_softcap is not None:
            raise ConfigError(
                "pooler-config: classifier_from_token is not for models whose logits are bent"
                f" (final_logit_softcapping {model.logits_softcap})"
            )
        head = read_score_head(folder, pooling, tokens, hidden_size)
        head = head * (1.0 if tokens is None else model.logits_scale)
    how = f"{pooling.pooling_type} state, {pooling.activation}, {pooling.size} numbers"
    log.info("pooling: %s: %s", pooling.task, how)
    return Pooler(computed.logits, None if head is None else head.to(device))
