"""Qwen3 (arXiv 2505.09388): queries and keys are normed head by head."""

from services.worker.models.decoder import DecoderLayer, DecoderLM, Parts


class Qwen3ForCausalLM(DecoderLM):
    def make_layer(self, parts: Parts, layer: int) -> DecoderLayer:
        bias = self.config.attention_bias
        attention = parts.attention(layer, norm="heads", has_qkv_bias=bias, has_out_bias=bias)
        return DecoderLayer(parts, attention, parts.mlp())
