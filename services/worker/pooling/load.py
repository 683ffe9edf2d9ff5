"""Makes the pooler of a model that is loaded."""

import logging
from pathlib import Path
from typing import cast

import torch

from services.worker.models import CausalLM
from services.worker.models.decoder import DecoderLM
from services.worker.pooling.head import make_up_score_head, read_score_head
from services.worker.pooling.prompts import StatePooler
from services.worker.step.parts import Pooler
from shared.errors import ConfigError
from shared.settings.worker import WorkerConfig
from shared.wire.messages import PoolingInfo

log = logging.getLogger(__name__)


def make_pooler(
    settings: WorkerConfig,
    folder: Path,
    pooling: PoolingInfo,
    model: DecoderLM | CausalLM,
    computed: CausalLM,
    device: torch.device,
) -> Pooler:
    """Raises ConfigError."""
    if not isinstance(model, DecoderLM):
        return cast(Pooler, computed.make_pooler(pooling))
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
    return StatePooler(computed.logits, None if head is None else head.to(device))
