"""LFM2 (arXiv 2511.23404), dense and with experts: most layers are short convolutions, the others
attention."""

from abc import abstractmethod
from typing import Annotated

import msgspec
from torch import nn

from kernels.route import Routing
from services.worker.config.model_config import ModelConfig, Num
from services.worker.config.sparse_config import SparseConfig
from services.worker.hybrids.short_conv import ShortConv
from services.worker.layers.attention import Attention
from services.worker.layers.gated import GatedNames
from services.worker.layers.mlp import GatedMLP, Mixture
from services.worker.layers.ops import Ops, X
from services.worker.models.decoder import DecoderLM
from services.worker.models.parts import Parts

NAMES = GatedNames("w1", "w3", "w2")
ATTENTION, CONVOLUTION = "full_attention", "conv"


class LfmConfig(ModelConfig, frozen=True, kw_only=True):
    rms_norm_eps: float = msgspec.field(default=1e-5, name="norm_eps")
    rope_theta: float | None = 1e6
    tie_word_embeddings: bool | None = True
    layer_types: list[str] | None = None
    full_attn_idxs: list[int] | None = None
    conv_size: Annotated[int, msgspec.Meta(ge=1, le=16)] = msgspec.field(
        default=3, name="conv_L_cache"
    )
    conv_bias: bool = False

    def convolves(self, layer: int) -> bool:
        if self.layer_types is not None:
            return self.layer_types[layer] == CONVOLUTION
        return self.full_attn_idxs is not None and layer not in self.full_attn_idxs

    def problems(self) -> list[str]:
        problems, types = super().problems(), self.layer_types
        if types is not None and len(types) != self.num_hidden_layers:
            problems.append(f"layer_types has {len(types)}, not {self.num_hidden_layers}")
        if unknown := set(types or []) - {ATTENTION, CONVOLUTION}:
            problems.append(f"layer_types {', '.join(sorted(unknown))} are not supported")
        return problems


class LfmLayer(nn.Module):
    """A convolution or attention, and a feed-forward network; their inputs are normed."""

    def __init__(
        self, parts: Parts, mixer: ShortConv | Attention, feed_forward: GatedMLP | Mixture
    ) -> None:
        super().__init__()
        self.operator_norm = parts.norm()
        if isinstance(mixer, ShortConv):
            self.conv = mixer
        else:
            self.self_attn = mixer
        self.ffn_norm = parts.norm()
        self.feed_forward = feed_forward
        self._mixer = mixer

    def forward(self, ops: Ops[X], x: X) -> X:
        """[T, hidden] → [T, hidden]"""
        x = self._mixer.forward(ops, x, norm=self.operator_norm, residual=x)
        return self.feed_forward.forward(ops, x, norm=self.ffn_norm, residual=x)


class LfmLM(DecoderLM):
    config: LfmConfig

    def make_layer(self, parts: Parts, layer: int) -> LfmLayer:
        mixer: ShortConv | Attention
        if self.config.convolves(layer):
            mixer = self._make_conv(layer)
        else:
            mixer = parts.attention(layer, norm="heads")
        return LfmLayer(parts, mixer, self.make_mlp(parts, layer))

    @abstractmethod
    def make_mlp(self, parts: Parts, layer: int) -> GatedMLP | Mixture:
        """The feed-forward network of ``layer``."""

    def _make_conv(self, layer: int) -> ShortConv:
        config, parallel = self.config, self.parallel
        _, kv_heads = parallel.heads(config.num_attention_heads, config.num_key_value_heads)
        entry = 2, kv_heads.num, config.head_dim
        size, width, bias = config.hidden_size, config.conv_size, config.conv_bias
        return ShortConv(size, width, entry, layer, parallel, has_bias=bias)


class Lfm2ForCausalLM(LfmLM):
    class Config(LfmConfig, frozen=True, kw_only=True):
        intermediate_size: int = 12288
        block_ff_dim: int | None = None
        block_auto_adjust_ff_dim: bool = True
        block_ffn_dim_multiplier: float | None = 1.0
        block_multiple_of: Annotated[int, msgspec.Meta(ge=1)] = 256

        @property
        def inner_size(self) -> int:
            """Two thirds of the size, rounded up."""
            size = self.block_ff_dim or self.intermediate_size
            if not self.block_auto_adjust_ff_dim:
                return size
            size = int(2 * size / 3)
            if self.block_ffn_dim_multiplier is None:
                return size
            multiple = self.block_multiple_of
            return -(-int(self.block_ffn_dim_multiplier * size) // multiple) * multiple

    config: Config

    def make_mlp(self, parts: Parts, layer: int) -> GatedMLP:
        return parts.mlp(size=self.config.inner_size, names=NAMES)


Lfm2VlForConditionalGeneration = Lfm2ForCausalLM


MIN_SUM = 1e-6


class Lfm2MoeForCausalLM(LfmLM):
    class Config(LfmConfig, SparseConfig, frozen=True, kw_only=True):
        num_experts: Num
        num_experts_per_tok: Num
        moe_intermediate_size: Num
        num_dense_layers: int = 2
        norm_topk_prob: bool = True
        use_expert_bias: bool = True
        routed_scaling_factor: float = 1.0

        @property
        def num_routed_experts(self) -> int:
            return self.num_experts

        @property
        def routing(self) -> Routing:
            return Routing(
                self.num_experts_per_tok,
                "sigmoid",
                min_sum=MIN_SUM if self.norm_topk_prob else None,
                factor=self.routed_scaling_factor,
            )

        def is_sparse(self, layer: int) -> bool:
            return layer >= self.num_dense_layers

    config: Config

    def make_mlp(self, parts: Parts, layer: int) -> GatedMLP | Mixture:
        config = self.config
        if not config.is_sparse(layer):
            return parts.mlp(names=NAMES)
        return Mixture(
            parts.router(config.num_experts, config.routing, has_correction=config.use_expert_bias),
            parts.experts(config.num_experts, config.moe_intermediate_size, names=NAMES),
        )
