"""Root-mean-square norm (arXiv 1910.07467)."""

from torch import nn

from services.worker.layers.weights import empty_parameter


class RMSNorm(nn.Module):
    """[..., size] → [..., size]"""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = empty_parameter(size)
        self.eps = eps
