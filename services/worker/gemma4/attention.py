"""Gemma 4's attention: values are normed, keys may be values too, and the last layers read the keys
and values of an earlier one."""

from torch import nn

from services.worker.gemma4.config import FULL, Gemma4Config
from services.worker.gemma4.operators import attend, attend_to_written
from services.worker.layers.attention import Attention
from services.worker.layers.heads import AttentionSpec, Heads
from services.worker.layers.linear import Linear
from services.worker.layers.norm import RMSNorm
from services.worker.layers.ops import Ops, X
from services.worker.layers.parallel import Parallel
from services.worker.layers.rope import RotaryEmbedding


class OwnAttention(Attention):
    """Over keys and values of its own."""

    def __init__(
        self, config: Gemma4Config, layer: int, rotary: RotaryEmbedding, parallel: Parallel
    ) -> None:
        head_dim, num_kv_heads = config.head_sizes(layer)
        spec = AttentionSpec(
            num_heads=config.num_attention_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            scale=1.0,
            norm="heads",
            window=config.window(layer),
            is_causal=config.kinds[layer] == FULL,
        )
        size, eps, bias = config.hidden_size, config.rms_norm_eps, config.attention_bias
        super().__init__(
            *(size, spec, layer, rotary, eps, parallel), has_qkv_bias=bias, has_out_bias=bias
        )
        self._num_inputs = config.num_hidden_layers * config.num_inputs
        if config.has_keys_as_values(layer):
            shards = parallel.heads(spec.num_heads, spec.num_kv_heads)
            query, key = (each.times(head_dim) for each in shards)
            self.qkv_proj = Linear(size, {"q_proj": query, "k_proj": key}, bias)

    @property
    def numbers_per_token(self) -> int:
        """With the inputs of all layers, and those that they are made of."""
        return super().numbers_per_token + self.qkv_proj.outputs + 5 * self._num_inputs

    def forward(
        self,
        ops: Ops[X],
        x: X,
        *,
        norm: RMSNorm | None = None,
        residual: X | None = None,
        scale: float = 1.0,
    ) -> X:
        attended = attend(ops, ops.linear(x, self.qkv_proj, norm=norm), self.heads)
        return ops.linear(attended, self.o_proj, residual=residual, scale=scale)


class SharedAttention(nn.Module):
    """Over the keys and values of the layer of ``source``."""

    def __init__(
        self, config: Gemma4Config, layer: int, source: OwnAttention, parallel: Parallel
    ) -> None:
        super().__init__()
        spec = source.heads.spec
        heads, _ = parallel.heads(config.num_attention_heads, config.head_sizes(layer)[1])
        size, query = config.hidden_size, heads.times(spec.head_dim)
        self.q_proj = Linear(size, query, config.attention_bias)
        self.q_norm = RMSNorm(spec.head_dim, config.rms_norm_eps)
        self.o_proj = Linear(query, size, config.attention_bias)
        self._source = (source,)  # no module of this one

    @property
    def heads(self) -> Heads:
        return self._source[0].heads._replace(query_norm=self.q_norm)

    def forward(self, ops: Ops[X], x: X, *, norm: RMSNorm) -> X:
        attended = attend_to_written(ops, ops.linear(x, self.q_proj, norm=norm), self.heads)
        return ops.linear(attended, self.o_proj)
