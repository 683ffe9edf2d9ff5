"""Root-mean-square norm."""

from torch import Tensor, nn

from kernels.rms_norm import rms_norm
from services.worker.layers.linear import empty_parameter


class RMSNorm(nn.Module):
    """[..., size] → [..., size]"""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = empty_parameter(size)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)
