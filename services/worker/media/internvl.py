"""InternVL 3 and 3.5 (arXiv 2504.10479, 2508.18265) and Qianfan-OCR: the text part, a Qwen2 or a
Qwen3."""

from typing import Literal

from services.worker.models.decoder import DecoderLayer
from services.worker.models.parts import Parts
from services.worker.models.qwen3 import Qwen3ForCausalLM


class InternVLForConditionalGeneration(Qwen3ForCausalLM):
    class Config(Qwen3ForCausalLM.Config, frozen=True, kw_only=True):
        model_type: Literal["qwen2", "qwen3"] = "qwen2"

    config: Config

    def make_layer(self, parts: Parts, layer: int) -> DecoderLayer:
        if self.config.model_type == "qwen3":
            return super().make_layer(parts, layer)
        window = self.config.window(layer)
        attention = parts.attention(layer, window=window, has_qkv_bias=True)
        return DecoderLayer(parts, attention, parts.mlp())


QianfanOCRForConditionalGeneration = InternVLForConditionalGeneration
