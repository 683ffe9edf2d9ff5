"""Kimi Linear (arXiv 2510.26692): most layers are delta rules with a decay of each channel, the
others attend to latents without rotary positions; all but the first have experts."""

from typing import Annotated, Any

import msgspec
from torch import nn

from services.worker.config.frequencies import Rope
from services.worker.config.model_config import Num
from services.worker.hybrids.channel_delta import ChannelDelta
from services.worker.hybrids.delta_rows import DeltaSpec
from services.worker.hybrids.layer_kinds import ATTENTION, STATEFUL, NoRope, kind_problems
from services.worker.layers.gated import GatedNames
from services.worker.layers.latent import LatentAttention
from services.worker.layers.mlp import GatedMLP, Mixture
from services.worker.layers.ops import Ops, X
from services.worker.models.decoder import DecoderLM
from services.worker.models.deepseek import LatentConfig
from services.worker.models.parts import Parts

EXPERT_NAMES = GatedNames("w1", "w3", "w2")
DENSE, SPARSE = "dense", "sparse"


class DeltaConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Layers are counted from 1."""

    kda_layers: list[int] = []
    full_attn_layers: list[int] = []
    head_dim: Num = 128
    num_heads: Num = 32
    short_conv_kernel_size: Annotated[int, msgspec.Meta(ge=2, le=16)] = 4


class KimiLayer(nn.Module):
    """The delta rule or attention, and a feed-forward network; their inputs are normed."""

    def __init__(
        self, parts: Parts, mixer: ChannelDelta | LatentAttention, network: GatedMLP | Mixture
    ) -> None:
        super().__init__()
        self.input_layernorm = parts.norm()
        self.self_attn = mixer
        self.post_attention_layernorm = parts.norm()
        if isinstance(network, Mixture):
            self.block_sparse_moe = network
        else:
            self.mlp = network
        self._network = network

    def forward(self, ops: Ops[X], x: X) -> X:
        """[T, hidden] → [T, hidden]"""
        x = self.self_attn.forward(ops, x, norm=self.input_layernorm, residual=x)
        return self._network.forward(ops, x, norm=self.post_attention_layernorm, residual=x)


class KimiLinearForCausalLM(DecoderLM):
    class Config(LatentConfig, frozen=True, kw_only=True):
        max_position_embeddings: Num = msgspec.field(default=1 << 20, name="model_max_length")
        q_lora_rank: int | None = None
        rope_interleave: bool = False
        n_routed_experts: Num = msgspec.field(name="num_experts")
        num_experts_per_tok: Num = msgspec.field(name="num_experts_per_token")
        n_shared_experts: int | None = msgspec.field(default=1, name="num_shared_experts")
        n_group: Num | None = msgspec.field(default=1, name="num_expert_group")
        norm_topk_prob: bool = msgspec.field(default=True, name="moe_renormalize")
        routed_scaling_factor: float = 2.446
        first_k_dense_replace: int = 1
        moe_layer_freq: Num = 1
        moe_router_activation_func: str = "sigmoid"
        mla_use_nope: bool = True
        layer_types: list[str] | None = None
        mlp_layer_types: list[str] | None = None
        linear_attn_config: DeltaConfig | None = None
        linear_head_dim: Num = 128
        linear_num_heads: Num = 32
        linear_conv_kernel_dim: Annotated[int, msgspec.Meta(ge=2, le=16)] = 4

        @property
        def kinds(self) -> list[str]:
            """The kind of each layer: attention is where the delta rule is not."""
            if self.layer_types is not None or self.linear_attn_config is None:
                return self.layer_types or []
            ours = self.linear_attn_config
            named = dict.fromkeys(ours.full_attn_layers, ATTENTION)
            named |= dict.fromkeys(ours.kda_layers, STATEFUL)
            return [named[number] for number in sorted(named)]

        @property
        def networks(self) -> list[str]:
            """Of each layer."""
            if self.mlp_layer_types is not None:
                return self.mlp_layer_types
            num_dense = min(self.first_k_dense_replace, self.num_hidden_layers)
            return [DENSE] * num_dense + [SPARSE] * (self.num_hidden_layers - num_dense)

        def is_sparse(self, layer: int) -> bool:
            return self.networks[layer] == SPARSE

        @property
        def rope(self) -> Rope:
            return NoRope()

        @property
        def delta_spec(self) -> DeltaSpec:
            given = self.linear_attn_config or DeltaConfig(
                head_dim=self.linear_head_dim,
                num_heads=self.linear_num_heads,
                short_conv_kernel_size=self.linear_conv_kernel_dim,
            )
            return DeltaSpec(
                num_heads=given.num_heads,
                num_key_heads=given.num_heads,
                key_dim=given.head_dim,
                value_dim=given.head_dim,
                width=given.short_conv_kernel_size,
            )

        def problems(self) -> list[str]:
            num, networks = self.num_hidden_layers, self.networks
            name = "layer_types" if self.linear_attn_config is None else "linear_attn_config"
            problems = [*super().problems(), *kind_problems(self.kinds, num, name=name)]
            if len(networks) != num or {*networks} - {DENSE, SPARSE}:
                problems.append(f"mlp_layer_types are not {num} times {DENSE} or {SPARSE}")
            wanted: dict[str, Any] = {
                "moe_layer_freq": 1,
                "moe_router_activation_func": "sigmoid",
                "mla_use_nope": True,
            }
            for key, value in wanted.items():
                if (given := getattr(self, key)) != value:
                    problems.append(f"{key} {given!r} is not supported; only {value!r} is")
            return problems

    config: Config

    def make_layer(self, parts: Parts, layer: int) -> KimiLayer:
        config = self.config
        mixer: ChannelDelta | LatentAttention
        if config.kinds[layer] == STATEFUL:
            size, spec, eps = config.hidden_size, config.delta_spec, config.rms_norm_eps
            mixer = ChannelDelta(size, spec, layer, eps, self.parallel)
        else:
            mixer = parts.latent_attention(layer, config.latent_spec, config.q_lora_rank)
        return KimiLayer(parts, mixer, self._make_network(parts, layer))

    def _make_network(self, parts: Parts, layer: int) -> GatedMLP | Mixture:
        config = self.config
        if not config.is_sparse(layer):
            return parts.mlp()
        num, size = config.n_routed_experts, config.moe_intermediate_size
        shared = (config.n_shared_experts or 0) * size
        return Mixture(
            parts.router(num, config.routing, has_correction=True),
            parts.experts(num, size, EXPERT_NAMES),
            parts.mlp(size=shared) if shared else None,
        )
