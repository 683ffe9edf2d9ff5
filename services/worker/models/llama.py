"""Llama 2 and 3 (arXiv 2307.09288, 2407.21783) and models with the same structure.

The kinds of rotary positions are in ``config/frequencies.py``.
"""

from services.worker.config.model_config import ModelConfig
from services.worker.models.decoder import DecoderLayer, DecoderLM
from services.worker.models.parts import Parts


class LlamaForCausalLM(DecoderLM):
    class Config(ModelConfig, frozen=True):
        attention_bias: bool = False
        mlp_bias: bool = False

    config: Config

    def make_layer(self, parts: Parts, layer: int) -> DecoderLayer:
        bias = self.config.attention_bias
        attention = parts.attention(layer, has_qkv_bias=bias, has_out_bias=bias)
        return DecoderLayer(parts, attention, parts.mlp(self.config.mlp_bias))
