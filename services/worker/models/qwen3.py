"""Qwen3 (arXiv 2505.09388): queries and keys are normed head by head."""

from services.worker.models.decoder import DecoderLayer, DecoderLM
from services.worker.models.parts import Parts
from services.worker.models.qwen2 import WindowsConfig


class Qwen3ForCausalLM(DecoderLM):
    class Config(WindowsConfig, frozen=True):
        attention_bias: bool = False

    config: Config

    def make_layer(self, parts: Parts, layer: int) -> DecoderLayer:
        bias, window = self.config.attention_bias, self.config.window(layer)
        attention = parts.attention(
            layer, norm="heads", window=window, has_qkv_bias=bias, has_out_bias=bias
        )
        return DecoderLayer(parts, attention, parts.mlp())
