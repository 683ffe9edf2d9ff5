"""Llama 2 and 3 (arXiv 2307.09288, 2407.21783) and what is built like them.

The kinds of rotary positions are in ``layers/frequencies.py``.
"""

from services.worker.config.model_config import ModelConfig
from services.worker.layers.attention import Attention
from services.worker.layers.mlp import GatedMLP
from services.worker.models.decoder import DecoderLayer, DecoderLM


def make_layer(config: ModelConfig, layer: int) -> DecoderLayer:
    bias = config.attention_bias
    attention = Attention(config, layer, has_qkv_bias=bias, has_out_bias=bias)
    mlp = GatedMLP(config.hidden_size, config.intermediate_size, config.mlp_bias)
    return DecoderLayer(config, attention, mlp)


class LlamaForCausalLM(DecoderLM):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config, make_layer)
