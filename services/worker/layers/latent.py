"""Attention over a paged cache of latents (multi-head latent attention, arXiv 2405.04434)."""

from dataclasses import replace

import torch

from kernels.kv_layout import KVLayout
from services.worker.layers.heads import LatentExpansion, Latents, LatentSpec
from services.worker.layers.kept import Cached
from services.worker.layers.linear import Linear
from services.worker.layers.norm import RMSNorm
from services.worker.layers.ops import Ops, X
from services.worker.layers.parallel import Parallel
from services.worker.layers.rope import RotaryEmbedding
from services.worker.machine.kv_groups import KVSpec

EPS = 1e-6  # of the inner norms, not rms_norm_eps: as in DeepSeek's code and transformers


class LatentAttention(Cached):
    """Latent attention from the GEMMs of queries and latents to the output GEMM. Queries are made
    through ``query_rank`` numbers, or directly. ``spec`` counts the heads of all ranks; each rank
    has its own heads, and all latents.

    ``layer`` is its number in the model.
    """

    def __init__(
        self,
        hidden_size: int,
        spec: LatentSpec,
        layer: int,
        rotary: RotaryEmbedding,
        parallel: Parallel,
        *,
        query_rank: int | None,
        has_bias: bool = False,
    ) -> None:
        super().__init__()
        self.number = layer
        heads, _ = parallel.heads(spec.num_heads, spec.num_heads)
        spec = replace(spec, num_heads=heads.num)
        query = heads.times(spec.query_dim)
        self.q_proj = Linear(hidden_size, query) if query_rank is None else None
        if query_rank is not None:
            self.q_a_proj = Linear(hidden_size, query_rank, has_bias)
            self.q_a_layernorm = RMSNorm(query_rank, EPS)
            self.q_b_proj = Linear(query_rank, query)
        self.kv_a_proj_with_mqa = Linear(hidden_size, spec.entry_dim, has_bias)
        self.kv_a_layernorm = RMSNorm(spec.rank, EPS)
        self.kv_b_proj = LatentExpansion(heads, spec.nope_dim, spec.value_dim, spec.rank)
        self.o_proj = Linear(heads.times(spec.value_dim), hidden_size, has_bias)
        self.latents = Latents(spec, layer, self.kv_a_layernorm, self.kv_b_proj, rotary)

    @property
    def group(self) -> int:
        return self.latents.group

    def put_cache(self, place: int, group: int) -> None:
        self.latents = self.latents._replace(layer=place, group=group)

    @property
    def kv_spec(self) -> KVSpec:
        return KVSpec((1, 1, self.latents.spec.entry_dim))

    def kv_layout(self, dtype: torch.dtype, codes: torch.dtype | None) -> KVLayout:
        return KVLayout(self.kv_spec.entry, dtype, codes, self.latents.spec.rank)

    @property
    def numbers_per_token(self) -> int:
        """The numbers of a token's queries, before and after the expansion, and its output."""
        spec = self.latents.spec
        of_head = 2 * spec.query_dim + 2 * spec.entry_dim + 2 * spec.rank + spec.value_dim
        return spec.num_heads * of_head + 2 * spec.entry_dim

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
        if self.q_proj is not None:
            query = ops.linear(x, self.q_proj, norm=norm)
        else:
            query = ops.linear(x, self.q_a_proj, norm=norm)
            query = ops.linear(query, self.q_b_proj, norm=self.q_a_layernorm)
        latent = ops.linear(x, self.kv_a_proj_with_mqa, norm=norm)
        attended = ops.latent(query, latent, self.latents)
        return ops.linear(attended, self.o_proj, residual=residual, scale=scale)
