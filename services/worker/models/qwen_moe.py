"""Qwen1.5-MoE, Qwen2-MoE and Qwen3-MoE (arXiv 2407.10671, 2505.09388). Before Qwen3 a gate of its
own opens a network that all tokens share."""

from collections.abc import Iterable
from typing import Annotated

import msgspec

from kernels.route import Routing
from services.worker.config.model_config import Num
from services.worker.config.sparse_config import SparseConfig
from services.worker.layers.experts import Router, Scores
from services.worker.layers.gated import GatedProducts
from services.worker.layers.mlp import GatedMLP, Mixture
from services.worker.layers.norm import RMSNorm
from services.worker.layers.ops import Ops, X
from services.worker.models.decoder import DecoderLayer, DecoderLM
from services.worker.models.parts import Parts
from services.worker.models.qwen import WindowsConfig


class StepConfig(SparseConfig, WindowsConfig, frozen=True, kw_only=True):
    """One of every few layers has experts, unless the config lists it as a layer without."""

    num_experts: Num | None = None
    num_local_experts: Num | None = None  # its name in transformers 5 for Qwen3
    num_experts_per_tok: Num
    moe_intermediate_size: Num
    norm_topk_prob: bool = False
    decoder_sparse_step: Num = 1
    mlp_only_layers: list[int] | None = None
    sliding_window: Annotated[int, msgspec.Meta(ge=0)] | None = 4096  # 0 if unused

    @property
    def num_routed_experts(self) -> int:
        return self.num_experts or self.num_local_experts or 0

    @property
    def routing(self) -> Routing:
        return Routing(self.num_experts_per_tok, min_sum=0.0 if self.norm_topk_prob else None)

    def is_sparse(self, layer: int) -> bool:
        is_named = layer in (self.mlp_only_layers or [])
        return not is_named and (layer + 1) % self.decoder_sparse_step == 0

    def problems(self) -> list[str]:
        if not self.num_routed_experts:
            return ["num_experts is missing"]
        problems = super().problems()
        if self.use_sliding_window and self.sliding_window == 0:
            problems.append("sliding_window 0 is not supported where use_sliding_window is true")
        return problems


class OpenedMixture(Mixture):
    """The shared network's output is multiplied by a gate of the token."""

    def __init__(
        self, gate: Router, experts: Iterable[GatedProducts], shared: GatedMLP, opens: Scores
    ) -> None:
        super().__init__(gate, experts)
        self.shared_expert = shared
        self.shared_expert_gate = opens

    def forward(self, ops: Ops[X], x: X, *, norm: RMSNorm, residual: X, scale: float = 1.0) -> X:
        normed = ops.norm(x, norm)
        x = ops.experts(normed, self, residual=residual, scale=scale)
        shared = self.shared_expert.forward(ops, normed, scale=scale)
        return ops.open(normed, self.shared_expert_gate, y=shared, residual=x)


def opened_mixture(
    parts: Parts, config: SparseConfig, *, size: int, shared_size: int
) -> OpenedMixture:
    """Experts of an inner ``size``, and the network that all tokens share."""
    return OpenedMixture(
        parts.router(config.num_routed_experts, config.routing),
        parts.experts(config.num_routed_experts, size),
        parts.mlp(size=shared_size),
        Scores(config.hidden_size, 1),
    )


class Qwen2MoeForCausalLM(DecoderLM):
    class Config(StepConfig, frozen=True, kw_only=True):
        shared_expert_intermediate_size: Num
        qkv_bias: bool = True

    config: Config

    def make_layer(self, parts: Parts, layer: int) -> DecoderLayer:
        window = self.config.window(layer)
        attention = parts.attention(layer, window=window, has_qkv_bias=self.config.qkv_bias)
        return DecoderLayer(parts, attention, self._make_mlp(parts, layer))

    def _make_mlp(self, parts: Parts, layer: int) -> GatedMLP | Mixture:
        config = self.config
        if not config.is_sparse(layer):
            return parts.mlp()
        size, shared_size = config.moe_intermediate_size, config.shared_expert_intermediate_size
        return opened_mixture(parts, config, size=size, shared_size=shared_size)


class Qwen3MoeForCausalLM(DecoderLM):
    class Config(StepConfig, frozen=True):
        attention_bias: bool = False

    config: Config

    def make_layer(self, parts: Parts, layer: int) -> DecoderLayer:
        config, bias = self.config, self.config.attention_bias
        window = config.sliding_window if config.use_sliding_window else None
        attention = parts.attention(
            layer, norm="heads", window=window, has_qkv_bias=bias, has_out_bias=bias
        )
        return DecoderLayer(parts, attention, self._make_mlp(parts, layer))

    def _make_mlp(self, parts: Parts, layer: int) -> GatedMLP | Mixture:
        config = self.config
        if not config.is_sparse(layer):
            return parts.mlp()
        return Mixture(
            parts.router(config.num_routed_experts, config.routing),
            parts.experts(config.num_routed_experts, config.moe_intermediate_size),
        )
