"""DeepSeek-V3 (arXiv 2412.19437): a DeepSeek-V2 with another choice of experts."""

from services.worker.models.deepseek_v2 import DeepseekConfig, DeepseekV2ForCausalLM


class DeepseekV3ForCausalLM(DeepseekV2ForCausalLM):
    class Config(DeepseekConfig, frozen=True):
        first_k_dense_replace: int = 3

    config: Config
