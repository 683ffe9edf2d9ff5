"""Models of gated delta layers, and of attention with gates in one of every few layers, as
Qwen3-Next and Qwen3.5 are."""

from typing import Annotated, ClassVar

import msgspec
from torch import nn

from kernels.route import Routing
from services.worker.config.model_config import ModelConfig, Num
from services.worker.config.sparse_config import SparseConfig
from services.worker.hybrids.delta_rows import (
    DeltaSpec,
    channel_rows,
    joined_inputs,
    separate_inputs,
)
from services.worker.hybrids.layer_kinds import ATTENTION, STATEFUL, kind_problems
from services.worker.hybrids.ruled import Ruled
from services.worker.layers.attention import Attention
from services.worker.layers.linear import Linear
from services.worker.layers.mlp import GatedMLP, Mixture
from services.worker.layers.ops import Ops, X
from services.worker.layers.parallel import ALONE, Parallel, as_shard
from services.worker.models.decoder import DecoderLM
from services.worker.models.mtp import add_mtp_head
from services.worker.models.parts import Parts
from services.worker.models.qwen_moe import opened_mixture

HEAD_NAMES = "linear_num_value_heads", "linear_num_key_heads"


class GatedDelta(Ruled):
    """The gated delta rule (arXiv 2412.06464). Its inputs are ``joined`` if a checkpoint has them
    in one tensor."""

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


class HybridConfig(ModelConfig, frozen=True, kw_only=True):
    rotates_partly: ClassVar[bool] = True
    norm_offset: ClassVar[float] = 1.0

    head_size: int | None = msgspec.field(default=256, name="head_dim")
    partial_rotary_factor: float | None = 0.25
    attention_bias: bool = False
    layer_types: list[str] | None = None
    full_attention_interval: Num = 4
    linear_num_value_heads: Num = 32
    linear_num_key_heads: Num = 16
    linear_key_head_dim: Num = 128
    linear_value_head_dim: Num = 128
    linear_conv_kernel_dim: Annotated[int, msgspec.Meta(ge=2, le=16)] = 4
    num_nextn_predict_layers: int = msgspec.field(default=1, name="mtp_num_hidden_layers")

    @property
    def delta_spec(self) -> DeltaSpec:
        return DeltaSpec(
            num_heads=self.linear_num_value_heads,
            num_key_heads=self.linear_num_key_heads,
            key_dim=self.linear_key_head_dim,
            value_dim=self.linear_value_head_dim,
            width=self.linear_conv_kernel_dim,
        )

    @property
    def types(self) -> list[str]:
        """The type of each layer."""
        if self.layer_types is not None:
            return self.layer_types
        interval = self.full_attention_interval
        numbers = range(1, self.num_hidden_layers + 1)
        return [STATEFUL if number % interval else ATTENTION for number in numbers]

    def problems(self) -> list[str]:
        problems = [*super().problems(), *kind_problems(self.types, self.num_hidden_layers)]
        if self.linear_num_value_heads % self.linear_num_key_heads:
            problems.append(
                f"linear_num_value_heads {self.linear_num_value_heads} is no multiple of"
                f" linear_num_key_heads {self.linear_num_key_heads}"
            )
        return problems


class SparseHybridConfig(HybridConfig, SparseConfig, frozen=True, kw_only=True):
    intermediate_size: int = 0  # of layers without experts
    num_experts: Num
    num_experts_per_tok: Num
    moe_intermediate_size: Num
    shared_expert_intermediate_size: Num

    @property
    def num_routed_experts(self) -> int:
        return self.num_experts

    @property
    def routing(self) -> Routing:
        return Routing(self.num_experts_per_tok, min_sum=0.0)


class HybridLayer(nn.Module):
    """The delta rule or attention, and a feed-forward network; their inputs are normed."""

    def __init__(
        self, parts: Parts, mixer: GatedDelta | Attention, mlp: GatedMLP | Mixture
    ) -> None:
        super().__init__()
        self.input_layernorm = parts.norm()
        if isinstance(mixer, GatedDelta):
            self.linear_attn = mixer
        else:
            self.self_attn = mixer
        self.post_attention_layernorm = parts.norm()
        self.mlp = mlp
        self._mixer = mixer

    def forward(self, ops: Ops[X], x: X) -> X:
        """[T, hidden] → [T, hidden]"""
        x = self._mixer.forward(ops, x, norm=self.input_layernorm, residual=x)
        return self.mlp.forward(ops, x, norm=self.post_attention_layernorm, residual=x)


class HybridLM(DecoderLM):
    """``has_joined_inputs``: a checkpoint has all inputs of a delta layer in one tensor, and its
    gates in another."""

    config: HybridConfig
    has_joined_inputs: ClassVar[bool] = False

    def __init__(self, config: HybridConfig, parallel: Parallel = ALONE) -> None:
        super().__init__(config, parallel)
        add_mtp_head(self, config.num_nextn_predict_layers, self._make_mtp_parts)

    def make_layer(self, parts: Parts, layer: int) -> HybridLayer:
        mixer: GatedDelta | Attention
        if self.config.types[layer] == STATEFUL:
            spec, is_joined = self.config.delta_spec, self.has_joined_inputs
            eps, parallel = self.config.rms_norm_eps, self.parallel
            mixer = GatedDelta(
                self.config.hidden_size, spec, layer, eps, parallel, is_joined=is_joined
            )
        else:
            mixer = self._make_attention(layer)
        return HybridLayer(parts, mixer, self.make_mlp(parts, layer))

    def make_mlp(self, parts: Parts, layer: int) -> GatedMLP | Mixture:
        """The feed-forward network of ``layer``."""
        return parts.mlp()

    def _make_attention(self, layer: int) -> Attention:
        bias = self.config.attention_bias
        return self.parts.attention(
            layer, norm="heads", has_gate=True, has_qkv_bias=bias, has_out_bias=bias
        )

    def _make_mtp_parts(self, parts: Parts, layer: int) -> tuple[Attention, GatedMLP | Mixture]:
        return self._make_attention(layer), self.make_mlp(parts, layer)


class SparseHybridLM(HybridLM):
    config: SparseHybridConfig

    def make_mlp(self, parts: Parts, layer: int) -> GatedMLP | Mixture:
        config = self.config
        if not config.is_sparse(layer):
            return parts.mlp()
        size, shared_size = config.moe_intermediate_size, config.shared_expert_intermediate_size
        return opened_mixture(parts, config, size=size, shared_size=shared_size)
