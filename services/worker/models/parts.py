"""The parts of layers, of the sizes of a model's config."""

from typing import Literal

from kernels.route import Routing
from kernels.silu_mul import Act
from services.worker.config.model_config import ModelConfig
from services.worker.layers.attention import Attention
from services.worker.layers.experts import Router
from services.worker.layers.gated import USUAL_NAMES, GatedNames, GatedProducts
from services.worker.layers.heads import AttentionSpec, LatentSpec
from services.worker.layers.latent import LatentAttention
from services.worker.layers.mlp import GatedMLP
from services.worker.layers.norm import RMSNorm
from services.worker.layers.parallel import Parallel
from services.worker.layers.rope import RotaryEmbedding


class Parts:
    """Makes the parts of a family's layers: a rank's shards of the sizes of ``config``."""

    def __init__(self, config: ModelConfig, rotary: RotaryEmbedding, parallel: Parallel) -> None:
        self._config = config
        self._rotary = rotary
        self._parallel = parallel

    def attention(
        self,
        layer: int,
        *,
        norm: Literal["none", "heads", "tokens"] = "none",
        scale: float | None = None,
        window: int | None = None,
        softcap: float | None = None,
        has_sinks: bool = False,
        rotary: RotaryEmbedding | None = None,
        has_qkv_bias: bool = False,
        has_out_bias: bool = False,
        has_gate: bool = False,
    ) -> Attention:
        """``scale`` is by default that of arXiv 1706.03762, and ``rotary`` the trunk's."""
        config, rotary = self._config, rotary or self._rotary
        spec = AttentionSpec(
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            scale=config.head_dim**-0.5 if scale is None else scale,
            norm=norm,
            is_interleaved=rotary.is_interleaved,
            window=window,
            softcap=softcap,
            has_sinks=has_sinks,
        )
        return Attention(
            hidden_size=config.hidden_size,
            spec=spec,
            layer=layer,
            rotary=rotary,
            eps=config.rms_norm_eps,
            parallel=self._parallel,
            has_qkv_bias=has_qkv_bias,
            has_out_bias=has_out_bias,
            norm_offset=config.norm_offset,
            has_gate=has_gate,
        )

    def latent_attention(
        self, layer: int, spec: LatentSpec, query_rank: int | None, *, has_bias: bool = False
    ) -> LatentAttention:
        return LatentAttention(
            self._config.hidden_size,
            spec,
            layer,
            self._rotary,
            self._parallel,
            query_rank=query_rank,
            has_bias=has_bias,
        )

    def mlp(
        self,
        has_bias: bool = False,
        *,
        size: int | None = None,
        act: Act = "silu",
        names: GatedNames = USUAL_NAMES,
    ) -> GatedMLP:
        """``size`` is by default the model's ``intermediate_size``."""
        config = self._config
        size = config.intermediate_size if size is None else size
        return GatedMLP(config.hidden_size, size, self._parallel, has_bias, act, names)

    def router(self, num_experts: int, routing: Routing, *, has_correction: bool = False) -> Router:
        hidden_size = self._config.hidden_size
        return Router(hidden_size, num_experts, routing, has_correction=has_correction)

    def experts(
        self, num: int, size: int, names: GatedNames = USUAL_NAMES, *, has_bias: bool = False
    ) -> list[GatedProducts]:
        """``num`` of an inner ``size``."""
        hidden_size = self._config.hidden_size
        return [
            GatedProducts(hidden_size, shard, has_bias and shard.num > 0, names)
            for shard in self._parallel.experts(num, size)
        ]

    def norm(self) -> RMSNorm:
        return make_norm(self._config)


def make_norm(config: ModelConfig) -> RMSNorm:
    return RMSNorm(config.hidden_size, config.rms_norm_eps, config.norm_offset)
