"""Mixtral (arXiv 2401.04088): a Mistral with experts and with its own checkpoint names."""

from torch import nn

from kernels.route import Routing
from services.worker.config.model_config import Num, Window
from services.worker.config.sparse_config import SparseConfig
from services.worker.layers.attention import Attention
from services.worker.layers.gated import GatedNames
from services.worker.layers.mlp import Mixture
from services.worker.layers.ops import Ops, X
from services.worker.models.decoder import DecoderLM
from services.worker.models.parts import Parts

NAMES = GatedNames("w1", "w3", "w2")


class MixtralLayer(nn.Module):
    def __init__(self, parts: Parts, attention: Attention, mixture: Mixture) -> None:
        super().__init__()
        self.input_layernorm = parts.norm()
        self.self_attn = attention
        self.post_attention_layernorm = parts.norm()
        self.block_sparse_moe = mixture

    def forward(self, ops: Ops[X], x: X) -> X:
        x = self.self_attn.forward(ops, x, norm=self.input_layernorm, residual=x)
        return self.block_sparse_moe.forward(ops, x, norm=self.post_attention_layernorm, residual=x)


class MixtralForCausalLM(DecoderLM):
    class Config(SparseConfig, frozen=True):
        num_local_experts: Num = 8
        num_experts_per_tok: Num = 2
        sliding_window: Window = None

        @property
        def num_routed_experts(self) -> int:
            return self.num_local_experts

        @property
        def routing(self) -> Routing:
            return Routing(self.num_experts_per_tok, min_sum=0.0)

    config: Config

    def make_layer(self, parts: Parts, layer: int) -> MixtralLayer:
        config = self.config
        mixture = Mixture(
            parts.router(config.num_local_experts, config.routing),
            parts.experts(config.num_local_experts, config.intermediate_size, names=NAMES),
        )
        attention = parts.attention(layer, window=config.sliding_window)
        return MixtralLayer(parts, attention, mixture)
