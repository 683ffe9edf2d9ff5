"""The part of a checkpoint for texts, by our names."""

import logging
from importlib import import_module
from typing import cast

from services.worker.config.model_config import ModelConfig
from services.worker.weights.checkpoint import VIEWS, Checkpoint, TensorSource

log = logging.getLogger(__name__)

TRUNK, TEXT_TRUNK, TEXT = "model.", "model.language_model.", "language_model."
IMAGES = (  # and sounds
    *("visual.", "vision_tower.", "multi_modal_projector.", "projector.", "mlp_AR."),
    *("vision_model.", "resampler_model.", "mm_projector.", "vision_encoder.", "merger.", "mlp1."),
    *("vision_projection.", "embed_vision.", "vision_embedder.", "audio_tower.", "embed_audio."),
)


class TextPart(Checkpoint):
    """The tensors of a model, without those for images. The text's are in the trunk, or it is a
    model within the model, or it has the names of a model of texts."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint, tensors = checkpoint, checkpoint.tensors
        names = [each for each in tensors if not each.removeprefix(TRUNK).startswith(IMAGES)]
        super().__init__(checkpoint.folder, {name: tensors[name] for name in names})
        if num_left := len(tensors) - len(names):
            log.info("text: %d tensors for images are not part of it", num_left)
        self._is_in_trunk = any(name.startswith(TEXT_TRUNK) for name in names)
        self._is_within = any(name.startswith(TEXT) for name in names)

    def source(self, name: str) -> TensorSource:
        if self._is_within:
            name = TEXT + name
        elif self._is_in_trunk and name.startswith(TRUNK):
            name = TEXT_TRUNK + name.removeprefix(TRUNK)
        return self._checkpoint.source(name)


def with_our_names(checkpoint: Checkpoint, config: ModelConfig) -> Checkpoint:
    """``checkpoint`` by our names, if its family has others."""
    for name in config.architectures:
        if module := VIEWS.get(name):
            return cast(Checkpoint, import_module(module).view(TextPart(checkpoint), config))
    return TextPart(checkpoint)
