"""The decoder that most families are: pre-norm layers under one rotation, and an output head.

A family defines what its layers are made of. Modules are named as in its checkpoints.
"""

from collections.abc import Callable

from torch import Tensor, nn

from services.worker.config.model_config import ModelConfig
from services.worker.layers.attention import Attention
from services.worker.layers.embedding import Embedding, LMHead
from services.worker.layers.mlp import GatedMLP
from services.worker.layers.norm import RMSNorm
from services.worker.layers.rope import RotaryEmbedding, Rotation
from services.worker.models import CausalLM


class DecoderLayer(nn.Module):
    """[T, hidden] → [T, hidden]"""

    def __init__(self, config: ModelConfig, attention: Attention, mlp: GatedMLP) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = attention
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = mlp

    def forward(self, x: Tensor, rotation: Rotation) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), rotation)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


MakeLayer = Callable[[ModelConfig, int], DecoderLayer]


class Trunk(nn.Module):
    """ids and positions [T] → hidden states [T, hidden], before the last norm."""

    def __init__(self, config: ModelConfig, make_layer: MakeLayer, is_interleaved: bool) -> None:
        super().__init__()
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            make_layer(config, layer) for layer in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary = RotaryEmbedding(
            config.rope, config.head_dim, config.max_position_embeddings, is_interleaved
        )

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        x: Tensor = self.embed_tokens(input_ids)
        rotation = self.rotary(positions)
        for layer in self.layers:
            x = layer(x, rotation)
        return x


class DecoderLM(CausalLM):
    """The trunk and its output head.

    ``make_layer`` gives the layer of an index; ``is_interleaved``: neighbours, and not a
    head's halves, are the pairs of its rotation.
    """

    def __init__(
        self, config: ModelConfig, make_layer: MakeLayer, is_interleaved: bool = False
    ) -> None:
        super().__init__(config)
        self.config = config
        self.model = Trunk(config, make_layer, is_interleaved)
        source = "model.embed_tokens" if config.tie_word_embeddings else "lm_head"
        self.lm_head = LMHead(config.vocab_size, config.hidden_size, f"{source}.weight")
        if config.tie_word_embeddings:
            self.lm_head.share(self.model.embed_tokens.weight)

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        hidden: Tensor = self.model(input_ids, positions)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.lm_head(self.model.norm(hidden))
        return logits
