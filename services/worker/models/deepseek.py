"""DeepSeek-V2 and V3 (arXiv 2405.04434, 2412.19437): heads attend to latents, and later layers have
experts. V3 chooses these in another way, and has layers that predict further tokens (MTP)."""

from typing import ClassVar, Literal

from kernels.route import Routing
from services.worker.layers.heads import LatentSpec
from services.worker.layers.latent import LatentAttention
from services.worker.layers.mlp import GatedMLP, Mixture
from services.worker.layers.parallel import ALONE, Parallel
from services.worker.models.decoder import DecoderLayer, DecoderLM
from services.worker.models.grouped_experts import GroupedConfig, make_mlp
from services.worker.models.mtp import add_mtp_head
from services.worker.models.parts import Parts


class LatentConfig(GroupedConfig, frozen=True):
    kv_lora_rank: int = 512
    q_lora_rank: int | None = 1536
    qk_nope_head_dim: int = 128
    qk_rope_head_dim: int = 64
    v_head_dim: int = 128
    rope_interleave: bool = True
    attention_bias: bool = False

    @property
    def head_dim(self) -> int:
        """The size of the rotated part."""
        return self.qk_rope_head_dim

    @property
    def latent_spec(self) -> LatentSpec:
        query_dim = self.qk_nope_head_dim + self.qk_rope_head_dim
        return LatentSpec(
            num_heads=self.num_attention_heads,
            rank=self.kv_lora_rank,
            nope_dim=self.qk_nope_head_dim,
            rope_dim=self.qk_rope_head_dim,
            value_dim=self.v_head_dim,
            scale=query_dim**-0.5 * self.rope.temperature,
            is_interleaved=self.rope_interleave,
        )


class LatentLM(DecoderLM):
    """Layers of latents and experts."""

    config: LatentConfig

    @property
    def is_interleaved(self) -> bool:
        return self.config.rope_interleave

    def make_layer(self, parts: Parts, layer: int) -> DecoderLayer:
        return DecoderLayer(parts, *self.make_parts(parts, layer))

    def make_parts(self, parts: Parts, layer: int) -> tuple[LatentAttention, GatedMLP | Mixture]:
        config = self.config
        attention = parts.latent_attention(
            layer, config.latent_spec, config.q_lora_rank, has_bias=config.attention_bias
        )
        return attention, make_mlp(parts, config, layer)


class DeepseekV2ForCausalLM(LatentLM):
    class Config(LatentConfig, frozen=True):
        has_correction: ClassVar[bool] = False
        topk_method: Literal["greedy", "group_limited_greedy"] = "greedy"
        norm_topk_prob: bool = False

        @property
        def routing(self) -> Routing:
            chosen, factor = self.num_experts_per_tok, self.routed_scaling_factor
            if self.topk_method == "greedy":
                return Routing(chosen, factor=factor)
            num_groups, num_kept = self.n_group or 1, self.topk_group or 1
            return Routing(chosen, num_groups=num_groups, num_kept_groups=num_kept, factor=factor)

        def problems(self) -> list[str]:
            problems = super().problems()
            if self.norm_topk_prob:
                problems.append("norm_topk_prob true is not supported; only false is")
            return problems

    config: Config


class DeepseekV3ForCausalLM(LatentLM):
    class Config(LatentConfig, frozen=True):
        first_k_dense_replace: int = 3
        num_nextn_predict_layers: int = 0

    config: Config

    def __init__(self, config: Config, parallel: Parallel = ALONE) -> None:
        super().__init__(config, parallel)
        add_mtp_head(self, config.num_nextn_predict_layers, self.make_parts)


KimiK25ForConditionalGeneration = DeepseekV3ForCausalLM  # for texts
Kimi_K25ForConditionalGeneration = DeepseekV3ForCausalLM
