"""Granite 3 (technical report of October 2024): a Llama with factors of its own in its parts."""

from services.worker.layers.parallel import ALONE, Parallel
from services.worker.models.decoder import DecoderLayer
from services.worker.models.llama import LlamaForCausalLM
from services.worker.models.parts import Parts


class GraniteForCausalLM(LlamaForCausalLM):
    class Config(LlamaForCausalLM.Config, frozen=True):
        attention_multiplier: float = 1.0
        embedding_multiplier: float = 1.0
        logits_scaling: float = 1.0
        residual_multiplier: float = 1.0

    config: Config

    def __init__(self, config: Config, parallel: Parallel = ALONE) -> None:
        super().__init__(config, parallel)
        self.embedding_scale = config.embedding_multiplier
        self.logits_scale = 1 / config.logits_scaling

    def make_layer(self, parts: Parts, layer: int) -> DecoderLayer:
        config = self.config
        bias, scale = config.attention_bias, config.attention_multiplier
        attention = parts.attention(layer, scale=scale, has_qkv_bias=bias, has_out_bias=bias)
        mlp = parts.mlp(config.mlp_bias)
        return DecoderLayer(parts, attention, mlp, config.residual_multiplier)
