"""Qwen2 (arXiv 2407.10671): biases on queries, keys and values."""

from services.worker.config.model_config import ModelConfig
from services.worker.layers.attention import Attention
from services.worker.layers.mlp import GatedMLP
from services.worker.models.decoder import DecoderLayer, DecoderLM


def make_layer(config: ModelConfig, layer: int) -> DecoderLayer:
    attention = Attention(config, layer, has_qkv_bias=True)
    return DecoderLayer(config, attention, GatedMLP(config.hidden_size, config.intermediate_size))


class Qwen2ForCausalLM(DecoderLM):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config, make_layer)
