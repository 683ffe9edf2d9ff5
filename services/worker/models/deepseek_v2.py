"""DeepSeek-V2 (arXiv 2405.04434): heads attend to latents, and later layers have experts."""

from typing import ClassVar

from services.worker.config.model_config import ModelConfig
from services.worker.layers.heads import LatentSpec
from services.worker.models.decoder import DecoderLayer, DecoderLM, Parts


class DeepseekConfig(ModelConfig, frozen=True):
    kv_lora_rank: int = 512
    q_lora_rank: int | None = 1536
    qk_nope_head_dim: int = 128
    qk_rope_head_dim: int = 64
    v_head_dim: int = 128
    rope_interleave: bool = True
    attention_bias: bool = False
    first_k_dense_replace: int = 0

    @property
    def head_dim(self) -> int:
        """Of what is rotated."""
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

    def problems(self) -> list[str]:
        problems = super().problems()
        if self.first_k_dense_replace < self.num_hidden_layers:
            problems.append(
                f"first_k_dense_replace {self.first_k_dense_replace} of"
                f" {self.num_hidden_layers} layers: experts are not supported"
            )
        return problems


class DeepseekV2ForCausalLM(DecoderLM):
    Config: ClassVar[type[DeepseekConfig]] = DeepseekConfig
    config: DeepseekConfig

    @property
    def is_interleaved(self) -> bool:
        return self.config.rope_interleave

    def make_layer(self, parts: Parts, layer: int) -> DecoderLayer:
        config = self.config
        attention = parts.latent_attention(
            layer, config.latent_spec, config.q_lora_rank, has_bias=config.attention_bias
        )
        return DecoderLayer(parts, attention, parts.mlp())
