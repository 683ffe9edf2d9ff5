"""Ling and Ring. Most have lightning attention: the last layer of a group attends to latents (2.5,
2.6), or to keys and values of heads (Ring-linear 2.0), as all layers of 2.0 do. All but the first
layers have experts."""

from abc import abstractmethod
from typing import Any, ClassVar

import msgspec
from torch import nn

from services.worker.config.model_config import Num
from services.worker.hybrids.delta_rows import joined_rows
from services.worker.hybrids.lightning import Lightning, LightningSpec
from services.worker.layers.attention import Attention
from services.worker.layers.latent import LatentAttention
from services.worker.layers.linear import Linear
from services.worker.layers.mlp import GatedMLP, Mixture
from services.worker.layers.ops import Ops, X
from services.worker.layers.parallel import ALONE, Parallel
from services.worker.layers.rope import RotaryEmbedding
from services.worker.models.decoder import AnyAttention, DecoderLM
from services.worker.models.deepseek import LatentConfig
from services.worker.models.grouped_experts import make_mlp
from services.worker.models.mtp import add_mtp_head
from services.worker.models.parts import Parts

# The published models have these values.
WANTED: dict[str, Any] = {
    "use_qk_norm": True,
    "use_qkv_bias": False,
    "use_bias": False,
    "linear_silu": False,
    "score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
}


class LightningConfig(LatentConfig, frozen=True, kw_only=True):
    rotates_partly: ClassVar[bool] = True

    q_lora_rank: int | None = None
    partial_rotary_factor: float | None = 0.5
    n_routed_experts: Num = msgspec.field(name="num_experts")
    n_shared_experts: int | None = msgspec.field(default=1, name="num_shared_experts")
    n_group: Num | None = 8
    topk_group: Num | None = 4
    first_k_dense_replace: int = 1
    moe_shared_expert_intermediate_size: int | None = None
    layer_group_size: Num = 5
    group_norm_size: Num = 4
    num_kv_heads_for_linear_attn: int | None = None
    use_qk_norm: bool = True
    use_qkv_bias: bool = False
    use_bias: bool = False
    linear_silu: bool = False
    score_function: str = "sigmoid"
    moe_router_enable_expert_bias: bool = True
    num_nextn_predict_layers: int = 0

    def is_lightning(self, layer: int) -> bool:
        """Layers after the last whole group attend like the last of a group."""
        size = self.layer_group_size
        return (layer + 1) % size != 0 and layer < self.num_hidden_layers // size * size

    @property
    def lightning_spec(self) -> LightningSpec:
        return LightningSpec(
            num_heads=self.num_attention_heads,
            head_dim=self.head_size or self.hidden_size // self.num_attention_heads,
            num_groups=self.group_norm_size,
            num_layers=self.num_hidden_layers,
        )

    @property
    def lightning_rotary_dim(self) -> int:
        factor = self.rope_values["partial_rotary_factor"]
        return int(self.lightning_spec.head_dim * (1.0 if factor is None else factor))

    def problems(self) -> list[str]:
        problems, spec = super().problems(), self.lightning_spec
        wanted = WANTED | {
            "num_kv_heads_for_linear_attn": spec.num_heads,
            "moe_shared_expert_intermediate_size": self.moe_intermediate_size,
        }
        for key, value in wanted.items():
            if (given := getattr(self, key)) not in (None, value):
                problems.append(f"{key} {given!r} is not supported; only {value!r} is")
        if spec.num_heads % spec.num_groups:
            problems.append(
                f"num_attention_heads {spec.num_heads} is no multiple of group_norm_size"
                f" {spec.num_groups}"
            )
        if not 0 < (size := self.lightning_rotary_dim) <= spec.head_dim or size % 2:
            problems.append(
                f"partial_rotary_factor of head_dim {spec.head_dim}: {size} numbers cannot be"
                " rotated in pairs"
            )
        return problems


class LingLayer(nn.Module):
    """Lightning attention or another one, and a feed-forward network; their inputs are normed."""

    def __init__(
        self, parts: Parts, mixer: Lightning | AnyAttention, mlp: GatedMLP | Mixture
    ) -> None:
        super().__init__()
        self.input_layernorm = parts.norm()
        self.self_attn = mixer
        self.post_attention_layernorm = parts.norm()
        self.mlp = mlp

    def forward(self, ops: Ops[X], x: X) -> X:
        """[T, hidden] → [T, hidden]"""
        x = self.self_attn.forward(ops, x, norm=self.input_layernorm, residual=x)
        return self.mlp.forward(ops, x, norm=self.post_attention_layernorm, residual=x)


class LightningLM(DecoderLM):
    """MTP layers have the other attention. ``lightning_rotary`` serves all layers with a state."""

    config: LightningConfig
    lightning_rotary: RotaryEmbedding

    def __init__(self, config: LightningConfig, parallel: Parallel = ALONE) -> None:
        super().__init__(config, parallel)
        add_mtp_head(self, config.num_nextn_predict_layers, self._make_mtp_parts)

    def make_layer(self, parts: Parts, layer: int) -> LingLayer:
        config = self.config
        mixer: Lightning | AnyAttention
        if config.is_lightning(layer):
            mixer = self._make_lightning(layer)
        else:
            mixer = self.make_attention(parts, layer)
        return LingLayer(parts, mixer, make_mlp(parts, config, layer))

    @abstractmethod
    def make_attention(self, parts: Parts, layer: int) -> AnyAttention:
        """The attention of ``layer``, which has no state."""

    def _make_lightning(self, layer: int) -> Lightning:
        config = self.config
        if not hasattr(self, "lightning_rotary"):
            size, length = config.lightning_rotary_dim, config.max_position_embeddings
            self.lightning_rotary = RotaryEmbedding(config.rope, size, length)
        return Lightning(
            config.hidden_size,
            config.lightning_spec,
            layer,
            self.lightning_rotary,
            config.rms_norm_eps,
            self.parallel,
        )

    def _make_mtp_parts(self, parts: Parts, layer: int) -> tuple[AnyAttention, GatedMLP | Mixture]:
        return self.make_attention(parts, layer), make_mlp(parts, self.config, layer)


class BailingMoeV2_5ForCausalLM(LightningLM):  # noqa: N801, its name in config.json
    class Config(LightningConfig, frozen=True, kw_only=True):
        @property
        def rotary_dim(self) -> int:
            """The factor is of lightning attention alone."""
            return self.qk_rope_head_dim

    config: Config

    @property
    def is_interleaved(self) -> bool:
        return self.config.rope_interleave

    def make_attention(self, parts: Parts, layer: int) -> LatentAttention:
        config = self.config
        return parts.latent_attention(layer, config.latent_spec, config.q_lora_rank)


class BailingMoeLinearV2ForCausalLM(LightningLM):
    class Config(LightningConfig, frozen=True, kw_only=True):
        @property
        def head_dim(self) -> int:
            return self.lightning_spec.head_dim

    config: Config

    def make_attention(self, parts: Parts, layer: int) -> Attention:
        """Queries, keys and values are one layer of a checkpoint."""
        config, size = self.config, self.config.head_dim
        attention = parts.attention(layer, norm="heads")
        heads, kv_heads = self.parallel.heads(
            config.num_attention_heads, config.num_key_value_heads
        )
        shards = heads.times(size), kv_heads.times(size), kv_heads.times(size)
        rows = {"query_key_value": joined_rows(*shards)}
        attention.qkv_proj = Linear(config.hidden_size, rows)
        return attention


class BailingMoeV2ForCausalLM(BailingMoeLinearV2ForCausalLM):
    """Ling and Ring 2.0, with attention alone."""

    class Config(BailingMoeLinearV2ForCausalLM.Config, frozen=True, kw_only=True):
        layer_group_size: Num = 1
        group_norm_size: Num = 1

    config: Config
