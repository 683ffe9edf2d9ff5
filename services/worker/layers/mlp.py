"""The gated feed-forward network."""

from torch import Tensor, nn
from torch.nn.functional import silu

from services.worker.layers.linear import Linear, MergedLinear


class GatedMLP(nn.Module):
    """SwiGLU (arXiv 2002.05202): [T, hidden_size] → [T, hidden_size]"""

    def __init__(self, hidden_size: int, size: int, has_bias: bool = False) -> None:
        super().__init__()
        sizes = {"gate_proj": size, "up_proj": size}
        self.gate_up_proj = MergedLinear(hidden_size, sizes, has_bias)
        self.down_proj = Linear(size, hidden_size, has_bias)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        out: Tensor = self.down_proj(silu(gate) * up)
        return out
