"""Llama 2 and 3 (arXiv 2307.09288, 2407.21783) and Mistral (arXiv 2310.06825). Kinds of rotary
positions are in ``config/frequencies.py``."""

from services.worker.config.model_config import ModelConfig, Window
from services.worker.models.decoder import DecoderLayer, DecoderLM
from services.worker.models.parts import Parts


class LlamaForCausalLM(DecoderLM):
    class Config(ModelConfig, frozen=True):
        attention_bias: bool = False
        mlp_bias: bool = False

        @property
        def window(self) -> int | None:
            return None

    config: Config

    def make_layer(self, parts: Parts, layer: int) -> DecoderLayer:
        bias, window = self.config.attention_bias, self.config.window
        attention = parts.attention(layer, window=window, has_qkv_bias=bias, has_out_bias=bias)
        return DecoderLayer(parts, attention, parts.mlp(self.config.mlp_bias))


class MistralForCausalLM(LlamaForCausalLM):
    class Config(LlamaForCausalLM.Config, frozen=True):
        model_type: str = "mistral"
        sliding_window: Window = 4096

        @property
        def window(self) -> int | None:
            return None if self.model_type == "llama" else self.sliding_window
