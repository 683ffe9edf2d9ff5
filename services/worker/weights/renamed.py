"""Checkpoints of families with other names for our tensors."""

import logging
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import cast

from torch import Tensor

from services.worker.config.model_config import ModelConfig
from services.worker.weights.checkpoint import VIEWS, Checkpoint, TensorSource

log = logging.getLogger(__name__)

MTP = "mtp."
TRUNK, TEXT_TRUNK, TEXT = "model.", "model.language_model.", "language_model."
IMAGES = (  # and sounds
    *("visual.", "vision_tower.", "multi_modal_projector.", "projector.", "mlp_AR."),
    *("vision_model.", "resampler_model.", "mm_projector."),
    *("merger.", "embed_vision.", "vision_embedder.", "audio_tower.", "embed_audio."),
)


def third(number: int) -> Callable[[Tensor], Tensor]:
    return lambda whole: whole.chunk(3)[number]


LFM2 = {
    "self_attn.o_proj.": TensorSource("self_attn.out_proj."),
    "self_attn.q_norm.": TensorSource("self_attn.q_layernorm."),
    "self_attn.k_norm.": TensorSource("self_attn.k_layernorm."),
    "model.norm.": TensorSource("model.embedding_norm."),
    "conv.in_proj_b.": TensorSource("conv.in_proj.", third(0)),
    "conv.in_proj_c.": TensorSource("conv.in_proj.", third(1)),
    "conv.in_proj_x.": TensorSource("conv.in_proj.", third(2)),
    "conv.conv.weight": TensorSource("conv.conv.weight", lambda whole: whole.squeeze(1)),
    "gate.e_score_correction_bias": TensorSource("expert_bias"),
}
GRANITE4 = {
    "block_sparse_moe.gate.": TensorSource("block_sparse_moe.router.layer."),
    "experts.gate_up_proj": TensorSource("input_linear.weight"),
    "experts.down_proj": TensorSource("output_linear.weight"),
}
KIMI_LINEAR = {".mlp.": TensorSource(".block_sparse_moe.")}  # as transformers saves it
NEMOTRON_H = {
    "model.embed_tokens.": TensorSource("backbone.embeddings."),
    "model.norm.": TensorSource("backbone.norm_f."),
    "model.layers.": TensorSource("backbone.layers."),
}
FAMILIES: Mapping[str, Mapping[str, TensorSource]] = {
    "GraniteMoeHybridForCausalLM": GRANITE4,
    "KimiLinearForCausalLM": KIMI_LINEAR,
    "Lfm2ForCausalLM": LFM2,
    "Lfm2VlForConditionalGeneration": LFM2,
    "Lfm2MoeForCausalLM": LFM2,
    "NemotronHForCausalLM": NEMOTRON_H,
}
"""For parts of our names the family's, with a conversion."""


class Renamed(Checkpoint):
    """A view of ``checkpoint`` by our names, without an MTP head."""

    def __init__(self, checkpoint: Checkpoint, names: Mapping[str, TensorSource]) -> None:
        tensors = checkpoint.tensors
        own = {name: each for name, each in tensors.items() if not name.startswith(MTP)}
        super().__init__(checkpoint.folder, own)
        if num_left := len(tensors) - len(own):
            log.info("MTP: %d tensors are left out, and there are no drafts by them", num_left)
        self._names = names

    def source(self, name: str) -> TensorSource:
        for ours, theirs in self._names.items():
            is_own = name in self.tensors and theirs.transform is None
            if ours in name and not is_own:
                return theirs._replace(name=name.replace(ours, theirs.name))
        return TensorSource(name)


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
        if names := FAMILIES.get(name):
            return TextPart(Renamed(checkpoint, names))
        if module := VIEWS.get(name):
            text = TextPart(checkpoint)
            return cast(Checkpoint, import_module(module).view(text, config))
    return TextPart(checkpoint)
