"""GLM-4.5 and 4.6 (arXiv 2508.06471): half of each head is rotated."""

from typing import ClassVar, Literal

from services.worker.layers.attention import Attention
from services.worker.layers.parallel import ALONE, Parallel
from services.worker.models.decoder import DecoderLayer, DecoderLM
from services.worker.models.grouped_experts import GroupedConfig, make_mlp
from services.worker.models.mtp import MtpLayer, add_mtp_head
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
        add_mtp_head(self, config.num_nextn_predict_layers, self._make_mtp_layer)

    def make_layer(self, parts: Parts, layer: int) -> DecoderLayer:
        mlp = make_mlp(parts, self.config, layer)
        return DecoderLayer(parts, self._make_attention(parts, layer), mlp)

    def _make_mtp_layer(self, index: int) -> MtpLayer:
        config, parts = self.config, self.parts
        layer = config.num_hidden_layers + index
        attention, mlp = self._make_attention(parts, layer), make_mlp(parts, config, layer)
        return MtpLayer(parts, config.hidden_size, attention, mlp)

    def _make_attention(self, parts: Parts, layer: int) -> Attention:
        norm: Literal["heads", "none"] = "heads" if self.config.use_qk_norm else "none"
        return parts.attention(layer, norm=norm, has_qkv_bias=self.config.attention_bias)
