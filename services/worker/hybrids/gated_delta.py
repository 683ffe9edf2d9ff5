"""A layer with a state: the gated delta rule (arXiv 2412.06464)."""

from services.worker.hybrids.delta_rows import (
    DeltaSpec,
    channel_rows,
    joined_inputs,
    separate_inputs,
)
from services.worker.hybrids.ruled import Ruled
from services.worker.layers.linear import Linear
from services.worker.layers.parallel import Parallel, as_shard

HEAD_NAMES = "linear_num_value_heads", "linear_num_key_heads"


class GatedDelta(Ruled):
    """Its inputs are ``joined`` if a checkpoint has them in one tensor."""

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
        heads, key_heads = parallel.heads(spec.num_heads, spec.num_key_heads, HEAD_NAMES)
        channels, normed = channel_rows(spec, heads, key_heads), as_shard(spec.value_dim)
        super().__init__(layer, heads, channels, spec.width, normed)
        inputs, gates = (joined_inputs if is_joined else separate_inputs)(spec, heads, key_heads)
        self.in_proj, self.gates = Linear(hidden_size, inputs), Linear(hidden_size, gates)
        self.out_proj = Linear(heads.times(spec.value_dim), hidden_size)
        self._make_rule(key_heads.num, eps)
