"""LFM2 (arXiv 2511.23404): most layers are short convolutions, the others attention."""

from typing import Annotated

import msgspec
from torch import nn

from services.worker.config.model_config import ModelConfig
from services.worker.layers.gated import GatedNames
from services.worker.layers.mixture import Mixture
from services.worker.layers.mlp import GatedMLP
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
        self, parts: Parts, config: LfmConfig, layer: int, feed_forward: GatedMLP | Mixture
    ) -> None:
        super().__init__()
        self.operator_norm = parts.norm()
        if config.convolves(layer):
            self.conv = parts.short_conv(layer, config.conv_size, has_bias=config.conv_bias)
        else:
            self.self_attn = parts.attention(layer, norm="heads")
        self.ffn_norm = parts.norm()
        self.feed_forward = feed_forward
        self._mixes = self.conv if config.convolves(layer) else self.self_attn

    def forward(self, ops: Ops[X], x: X) -> X:
        """[T, hidden] → [T, hidden]"""
        x = self._mixes.forward(ops, x, norm=self.operator_norm, residual=x)
        return self.feed_forward.forward(ops, x, norm=self.ffn_norm, residual=x)


class Lfm2ForCausalLM(DecoderLM):
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

    def make_layer(self, parts: Parts, layer: int) -> LfmLayer:
        mlp = parts.mlp(size=self.config.inner_size, names=NAMES)
        return LfmLayer(parts, self.config, layer, mlp)
