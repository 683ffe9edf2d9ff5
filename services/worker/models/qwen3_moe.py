"""Qwen3 with experts (arXiv 2505.09388)."""

from services.worker.layers.mlp import GatedMLP, Mixture
from services.worker.models.decoder import DecoderLayer, DecoderLM
from services.worker.models.parts import Parts
from services.worker.models.qwen2_moe import StepConfig


class Qwen3MoeForCausalLM(DecoderLM):
    class Config(StepConfig, frozen=True):
        attention_bias: bool = False

    config: Config

    def make_layer(self, parts: Parts, layer: int) -> DecoderLayer:
        config, bias = self.config, self.config.attention_bias
        window = config.sliding_window if config.use_sliding_window else None
        attention = parts.attention(
            layer, norm="heads", window=window, has_qkv_bias=bias, has_out_bias=bias
        )
        return DecoderLayer(parts, attention, self._make_mlp(parts, layer))

    def _make_mlp(self, parts: Parts, layer: int) -> GatedMLP | Mixture:
        config = self.config
        if not config.is_sparse(layer):
            return parts.mlp()
        return Mixture(
            parts.router(config.num_routed_experts, config.routing),
            parts.experts(config.num_routed_experts, config.moe_intermediate_size),
        )
