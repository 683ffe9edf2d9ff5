"""Checkpoints of hybrids with other names for our tensors."""

import logging
from collections.abc import Callable, Mapping

from torch import Tensor

from services.worker.config.model_config import ModelConfig
from services.worker.weights.checkpoint import Checkpoint, TensorSource
from services.worker.weights.mtp_layouts import Layout, MtpView, hidden_first

log = logging.getLogger(__name__)

MTP = "mtp."


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
# Two layers of one mixer each are one of ours. Source: nemotron_h_mtp of vLLM.
FIRST_HEAD = "mtp.layers.0.", "mtp.layers.1."
NEMOTRON_MTP = Layout(
    {
        "token_layernorm": TensorSource("mtp.layers.0.enorm"),
        "hidden_layernorm": TensorSource("mtp.layers.0.hnorm"),
        "input_proj.weight": TensorSource("mtp.layers.0.eh_proj.weight", hidden_first),
        "input_layernorm": TensorSource("mtp.layers.0.norm"),
        "self_attn": TensorSource("mtp.layers.0.mixer"),
        "post_attention_layernorm": TensorSource("mtp.layers.1.norm"),
        "mlp": TensorSource("mtp.layers.1.mixer"),
        "final_layernorm": TensorSource("mtp.layers.1.final_layernorm"),
    }
)
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
    """A view of ``checkpoint`` by our names, without MTP tensors except those of ``heads``."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        names: Mapping[str, TensorSource],
        heads: tuple[str, ...] = (),
    ) -> None:
        self._checkpoint, tensors = checkpoint, checkpoint.tensors
        own = {
            name: each
            for name, each in tensors.items()
            if name.startswith(heads) or not name.startswith(MTP)
        }
        super().__init__(checkpoint.folder, own)
        if num_left := len(tensors) - len(own):
            log.info("MTP: %d tensors are left out, and there are no drafts by them", num_left)
        self._names = names

    def source(self, name: str) -> TensorSource:
        plain = self._checkpoint.source(name)
        for ours, theirs in self._names.items():
            is_own = plain.name in self.tensors and theirs.transform is None
            if ours in name and not is_own:
                found = self._checkpoint.source(name.replace(ours, theirs.name))
                return theirs._replace(name=found.name)
        return plain


def view(checkpoint: Checkpoint, config: ModelConfig) -> Checkpoint:
    """``checkpoint`` by our names."""
    names = next(FAMILIES[each] for each in config.architectures if each in FAMILIES)
    if not getattr(config, "num_nextn_predict_layers", 0):
        return Renamed(checkpoint, names)
    renamed = Renamed(checkpoint, names, FIRST_HEAD)
    return MtpView(renamed, NEMOTRON_MTP, config.num_hidden_layers)
