"""DeepSeek-V3 (arXiv 2412.19437): a DeepSeek-V2 with another choice of experts, and layers that
predict further tokens (MTP)."""

from services.worker.layers.parallel import ALONE, Parallel
from services.worker.models.deepseek_v2 import LatentConfig, LatentLM
from services.worker.models.mtp import NormedMtpLayer, add_mtp_head


class DeepseekV3ForCausalLM(LatentLM):
    class Config(LatentConfig, frozen=True):
        first_k_dense_replace: int = 3
        num_nextn_predict_layers: int = 0

    config: Config

    def __init__(self, config: Config, parallel: Parallel = ALONE) -> None:
        super().__init__(config, parallel)
        layers = [self._make_mtp_layer(i) for i in range(config.num_nextn_predict_layers)]
        add_mtp_head(self, layers)

    def _make_mtp_layer(self, index: int) -> NormedMtpLayer:
        attention, mlp = self.make_parts(self.parts, self.config.num_hidden_layers + index)
        return NormedMtpLayer(self.parts, self.config.hidden_size, attention, mlp)


KimiK25ForConditionalGeneration = DeepseekV3ForCausalLM  # for texts
Kimi_K25ForConditionalGeneration = DeepseekV3ForCausalLM
