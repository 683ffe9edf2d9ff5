"""A layer with a state: the gated delta rule (arXiv 2412.06464)."""

import torch

from services.worker.hybrids.delta_rows import (
    DeltaSpec,
    channel_rows,
    joined_inputs,
    separate_inputs,
)
from services.worker.hybrids.ruled import Ruled
from services.worker.layers.delta_rule import DeltaRule
from services.worker.layers.linear import Linear, WeightPiece, row_piece
from services.worker.layers.parallel import Parallel
from services.worker.layers.weights import empty_parameter

HEAD_NAMES = "linear_num_value_heads", "linear_num_key_heads"


class GatedDelta(Ruled):
    """``layer`` is its number in the model. Its inputs are ``joined`` if a checkpoint has them in
    one tensor. The convolution has the model's dtype; decays, their biases and the norm are
    float32."""

    def __init__(
        self,
        hidden_size: int,
        spec: DeltaSpec,
        layer: int,
        eps: float,
        parallel: Parallel,
        *,
        is_joined: bool = False,
    ) -> None:
        super().__init__()
        heads, key_heads = parallel.heads(spec.num_heads, spec.num_key_heads, HEAD_NAMES)
        inputs, gates = (joined_inputs if is_joined else separate_inputs)(spec, heads, key_heads)
        self._channels = channel_rows(spec, heads, key_heads)
        self._heads = heads
        self.in_proj, self.gates = Linear(hidden_size, inputs), Linear(hidden_size, gates)
        self.out_proj = Linear(heads.times(spec.value_dim), hidden_size)
        self.conv = empty_parameter(self._channels.num, spec.width)
        self.decay = empty_parameter(heads.num, dtype=torch.float32)
        self.dt_bias = empty_parameter(heads.num, dtype=torch.float32)
        self.norm = empty_parameter(spec.value_dim, dtype=torch.float32)
        self.number = layer
        own = self.conv, self.decay, self.dt_bias, self.norm
        self._follow(DeltaRule(0, key_heads.num, *own, eps))

    def checkpoint_pieces(self, name: str) -> dict[str, WeightPiece]:
        return {
            f"{name}.conv1d.weight": row_piece(self.conv[:, None], self._channels),
            f"{name}.A_log": row_piece(self.decay, self._heads),
            f"{name}.dt_bias": row_piece(self.dt_bias, self._heads),
            f"{name}.norm.weight": WeightPiece(self.norm),
        }
