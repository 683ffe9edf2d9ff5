"""LFM2 with experts (LFM2-8B-A1B)."""

from kernels.route import Routing
from services.worker.config.sparse_config import Num, SparseConfig
from services.worker.hybrids.lfm2 import NAMES, LfmConfig, LfmLM
from services.worker.layers.mixture import Mixture
from services.worker.layers.mlp import GatedMLP
from services.worker.models.parts import Parts

MIN_SUM = 1e-6


class Lfm2MoeForCausalLM(LfmLM):
    class Config(LfmConfig, SparseConfig, frozen=True, kw_only=True):
        num_experts: Num
        num_experts_per_tok: Num
        moe_intermediate_size: Num
        num_dense_layers: int = 2
        norm_topk_prob: bool = True
        use_expert_bias: bool = True
        routed_scaling_factor: float = 1.0

        @property
        def num_routed_experts(self) -> int:
            return self.num_experts

        @property
        def routing(self) -> Routing:
            return Routing(
                self.num_experts_per_tok,
                "sigmoid",
                min_sum=MIN_SUM if self.norm_topk_prob else None,
                factor=self.routed_scaling_factor,
            )

        def is_sparse(self, layer: int) -> bool:
            return layer >= self.num_dense_layers

    config: Config

    def make_mlp(self, parts: Parts, layer: int) -> GatedMLP | Mixture:
        config = self.config
        if not config.is_sparse(layer):
            return parts.mlp(names=NAMES)
        return Mixture(
            parts.router(config.num_experts, config.routing, has_correction=config.use_expert_bias),
            parts.experts(config.num_experts, config.moe_intermediate_size, names=NAMES),
        )
