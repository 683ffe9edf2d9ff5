"""Checkpoints of Ling and Ring by our names."""

from services.worker.config.model_config import ModelConfig
from services.worker.weights.checkpoint import Checkpoint, TensorSource
from services.worker.weights.mtp_layouts import OUR_NAME, hidden_first

NAMES = {
    "model.embed_tokens.": "model.word_embeddings.",
    ".self_attn.o_proj.": ".self_attn.dense.",
    ".self_attn.q_norm.": ".self_attn.query_layernorm.",
    ".self_attn.k_norm.": ".self_attn.key_layernorm.",
    ".self_attn.": ".attention.",
    ".gate.e_score_correction_bias": ".gate.expert_bias",
    ".token_layernorm.": ".enorm.",
    ".hidden_layernorm.": ".hnorm.",
    ".input_proj.": ".eh_proj.",
}


class LingNames(Checkpoint):
    """A view of ``checkpoint``, in which MTP layers follow the ``num_layers`` of the trunk. These
    take the embedding first."""

    def __init__(self, checkpoint: Checkpoint, num_layers: int) -> None:
        super().__init__(checkpoint.folder, checkpoint.tensors)
        self._num_layers = num_layers

    def source(self, name: str) -> TensorSource:
        transform = None
        if found := OUR_NAME.fullmatch(name):
            name = f"model.layers.{self._num_layers + int(found['layer'])}.{found['part']}"
            transform = hidden_first if found["part"].startswith("input_proj.") else None
        for ours, theirs in NAMES.items():
            name = name.replace(ours, theirs)
        return TensorSource(name, transform)


def view(checkpoint: Checkpoint, config: ModelConfig) -> Checkpoint:
    """``checkpoint`` by our names."""
    return LingNames(checkpoint, config.num_hidden_layers)
