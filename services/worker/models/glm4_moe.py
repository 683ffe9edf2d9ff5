"""GLM-4.5 and 4.6 (arXiv 2508.06471): half of each head is rotated."""

from typing import ClassVar, Literal

from services.worker.layers.attention import Attention
from services.worker.layers.mlp import GatedMLP, Mixture
from services.worker.layers.parallel import ALONE, Parallel
from services.worker.models.decoder import DecoderLayer, DecoderLM
from services.worker.models.grouped_experts import GroupedConfig, make_mlp
from services.worker.models.mtp import add_mtp_head
from services.worker.models.parts import Parts


class Glm4MoeForCausalLM(DecoderLM):
    class Config(GroupedConfig, frozen=True):
        rotates_partly: ClassVar[bool] = True
        partial_rotary_factor: float | None = 0.5
        first_k_dense_replace: int = 1
        attention_bias: bool = False
        use_qk_norm: bool = False
        num_nextn_predict_layers: int = 0

    config: Config

    def __init__(self, config: Config, parallel: Parallel = ALONE) -> None:
        super().__init__(config, parallel)
        add_mtp_head(self, config.num_nextn_predict_layers, self._make_parts)

    def make_layer(self, parts: Parts, layer: int) -> DecoderLayer:
        return DecoderLayer(parts, *self._make_parts(parts, layer))

    def _make_parts(self, parts: Parts, layer: int) -> tuple[Attention, GatedMLP | Mixture]:
        norm: Literal["heads", "none"] = "heads" if self.config.use_qk_norm else "none"
        attention = parts.attention(layer, norm=norm, has_qkv_bias=self.config.attention_bias)
        return attention, make_mlp(parts, self.config, layer)
