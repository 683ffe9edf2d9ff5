"""Qwen3 (arXiv 2505.09388): queries and keys are normed head by head."""

from services.worker.config.model_config import ModelConfig
from services.worker.layers.attention import Attention
from services.worker.layers.mlp import GatedMLP
from services.worker.models.decoder import DecoderLayer, DecoderLM


def make_layer(config: ModelConfig, layer: int) -> DecoderLayer:
    bias = config.attention_bias
    attention = Attention(config, layer, has_qkv_bias=bias, has_out_bias=bias, has_qk_norm=True)
    return DecoderLayer(config, attention, GatedMLP(config.hidden_size, config.intermediate_size))


class Qwen3ForCausalLM(DecoderLM):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config, make_layer)
