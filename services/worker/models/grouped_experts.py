"""Experts as DeepSeek-V3 has them (arXiv 2412.19437, 2.1.2), and GLM-4.5 with it: scores alone by
themselves, a correction for the choice, groups."""

from typing import ClassVar

from kernels.route import Routing
from services.worker.config.model_config import Num
from services.worker.config.sparse_config import SparseConfig
from services.worker.layers.mlp import GatedMLP, Mixture
from services.worker.models.parts import Parts

MIN_SUM = 1e-20


class GroupedConfig(SparseConfig, frozen=True, kw_only=True):
    has_correction: ClassVar[bool] = True

    n_routed_experts: Num
    num_experts_per_tok: Num
    moe_intermediate_size: Num
    n_shared_experts: int | None = None
    n_group: Num | None = 1
    topk_group: Num | None = 1
    first_k_dense_replace: int = 0
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.0

    @property
    def num_routed_experts(self) -> int:
        return self.n_routed_experts

    @property
    def routing(self) -> Routing:
        return Routing(
            self.num_experts_per_tok,
            "sigmoid",
            num_groups=self.n_group or 1,
            num_kept_groups=self.topk_group or 1,
            group_best=2,
            min_sum=MIN_SUM if self.norm_topk_prob else None,
            factor=self.routed_scaling_factor,
        )

    def is_sparse(self, layer: int) -> bool:
        return layer >= self.first_k_dense_replace


def make_mlp(parts: Parts, config: GroupedConfig, layer: int) -> GatedMLP | Mixture:
    """The MLP or the experts of ``layer``."""
    if not config.is_sparse(layer):
        return parts.mlp()
    num, size = config.n_routed_experts, config.moe_intermediate_size
    num_shared = config.n_shared_experts or 0
    return Mixture(
        parts.router(num, config.routing, has_correction=config.has_correction),
        parts.experts(num, size),
        parts.mlp(size=num_shared * size) if num_shared else None,
    )
