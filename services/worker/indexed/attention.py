"""Attention to latents of the keys that an indexer chooses."""

from dataclasses import replace
from functools import singledispatch
from typing import Any

from torch import Tensor

from services.worker.backends.recorder import Recorder, Value
from services.worker.backends.torch_lm import TorchOps
from services.worker.indexed.indexer import Indexer
from services.worker.layers.heads import Latents, LatentSpec
from services.worker.layers.latent import LatentAttention
from services.worker.layers.norm import RMSNorm
from services.worker.layers.ops import NotSupported, Ops, X
from services.worker.layers.parallel import Parallel
from services.worker.layers.rope import RotaryEmbedding


class IndexedAttention(LatentAttention):
    """With an ``indexer`` of its own, or with the choice of an earlier layer's."""

    def __init__(
        self,
        hidden_size: int,
        spec: LatentSpec,
        layer: int,
        rotary: RotaryEmbedding,
        parallel: Parallel,
        indexer: Indexer,
        *,
        query_rank: int,
        has_bias: bool,
    ) -> None:
        super().__init__(
            hidden_size, spec, layer, rotary, parallel, query_rank=query_rank, has_bias=has_bias
        )
        self.indexer = indexer if indexer.number == layer else None
        self._source = (indexer,)  # a tuple, since another layer's is no part of this one

    @property
    def source(self) -> Indexer:
        return self._source[0]

    @property
    def numbers_per_token(self) -> int:
        return super().numbers_per_token + self.source.numbers_per_token

    def forward(
        self,
        ops: Ops[X],
        x: X,
        *,
        norm: RMSNorm | None = None,
        residual: X | None = None,
        scale: float = 1.0,
    ) -> X:
        """scale · attention(norm(x)) + residual: [T, hidden] → [T, hidden]"""
        query = ops.linear(x, self.q_a_proj, norm=norm)
        if self.indexer is not None:
            self.indexer.forward(ops, x, query, norm, self.q_a_layernorm)
        query = ops.linear(query, self.q_b_proj, norm=self.q_a_layernorm)
        latent = ops.linear(x, self.kv_a_proj_with_mqa, norm=norm)
        attended = attend(ops, query, latent, self.latents, self.source.chosen)
        return ops.linear(attended, self.o_proj, residual=residual, scale=scale)


@singledispatch
def attend(ops: object, query: Any, latent: Any, latents: Latents, chosen: Any) -> Any:
    """Attention to latents as the operators ``ops`` have it, to the ``chosen`` keys alone."""
    raise NotSupported(f"indexed attention by {type(ops).__name__}")


@attend.register
def _(ops: TorchOps, query: Tensor, latent: Tensor, latents: Latents, chosen: Tensor) -> Tensor:
    return ops.latent(query, latent, latents, chosen)


@attend.register
def _(ops: Recorder, query: Value, latent: Value, latents: Latents, chosen: Value) -> Value:
    out = ops.latent(query, latent, latents)
    ops.instructions[-1] = replace(ops.instructions[-1], second=chosen.register)
    return out
