"""The keys of config.json for experts, under each family's own names."""

from kernels.route import Routing
from services.worker.config.model_config import ModelConfig


class SparseConfig(ModelConfig, frozen=True):
    """A family defines the number of experts in a layer with experts, and their choice."""

    @property
    def num_routed_experts(self) -> int:
        raise NotImplementedError

    @property
    def routing(self) -> Routing:
        raise NotImplementedError

    def is_sparse(self, layer: int) -> bool:
        """True if ``layer`` has experts."""
        return True

    def problems(self) -> list[str]:
        problems = super().problems()
        try:
            self.routing.check(self.num_routed_experts)
        except ValueError as error:
            problems.append(f"its experts cannot be chosen: {error}")
        return problems
