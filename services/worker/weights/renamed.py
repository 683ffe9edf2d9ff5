"""Checkpoints of families with other names for our tensors."""

from collections.abc import Callable, Mapping

from torch import Tensor

from services.worker.config.model_config import ModelConfig
from services.worker.weights.checkpoint import Checkpoint, TensorSource


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
FAMILIES: Mapping[str, Mapping[str, TensorSource]] = {
    "Lfm2ForCausalLM": LFM2,
    "Lfm2MoeForCausalLM": LFM2,
}
"""For parts of our names the family's, with a conversion."""


class Renamed(Checkpoint):
    """A view of ``checkpoint`` by our names."""

    def __init__(self, checkpoint: Checkpoint, names: Mapping[str, TensorSource]) -> None:
        super().__init__(checkpoint.folder, checkpoint.tensors)
        self._names = names

    def source(self, name: str) -> TensorSource:
        for ours, theirs in self._names.items():
            if ours in name:
                return theirs._replace(name=name.replace(ours, theirs.name))
        return TensorSource(name)


def with_our_names(checkpoint: Checkpoint, config: ModelConfig) -> Checkpoint:
    """``checkpoint`` by our names, if its family has others."""
    for name in config.architectures:
        if names := FAMILIES.get(name):
            return Renamed(checkpoint, names)
    return checkpoint
