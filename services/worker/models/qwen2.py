"""Qwen2 (arXiv 2407.10671): biases on queries, keys and values."""

from services.worker.models.decoder import DecoderLayer, DecoderLM, Parts


class Qwen2ForCausalLM(DecoderLM):
    def make_layer(self, parts: Parts, layer: int) -> DecoderLayer:
        return DecoderLayer(parts, parts.attention(layer, has_qkv_bias=True), parts.mlp())
