"""ERNIE 4.5, dense (technical report of June 2025): rotated pairs are neighbours."""

from services.worker.config.model_config import ModelConfig
from services.worker.layers.attention import Attention
from services.worker.layers.mlp import GatedMLP
from services.worker.models.decoder import DecoderLayer, DecoderLM


def make_layer(config: ModelConfig, layer: int) -> DecoderLayer:
    bias = config.use_bias
    attention = Attention(config, layer, has_qkv_bias=bias, has_out_bias=bias)
    mlp = GatedMLP(config.hidden_size, config.intermediate_size, bias)
    return DecoderLayer(config, attention, mlp)


class Ernie4_5ForCausalLM(DecoderLM):  # noqa: N801, its name in config.json
    def __init__(self, config: ModelConfig) -> None:
        config = config.with_defaults(rope_theta=500000.0, tie_word_embeddings=True)
        super().__init__(config, make_layer, is_interleaved=True)
