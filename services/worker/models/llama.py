"""Llama 2 and 3 (arXiv 2307.09288, 2407.21783) and models with the same structure: Mistral (arXiv
2310.06825) and the text parts of LLaVA, Pixtral and Mistral 3. Kinds of rotary positions are in
``config/frequencies.py``."""

from typing import Literal

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


class LlavaForConditionalGeneration(MistralForCausalLM):
    class Config(MistralForCausalLM.Config, frozen=True, kw_only=True):
        model_type: Literal["llama", "mistral"] = "llama"
        hidden_size: int = 4096  # as files of 7B leave these out
        intermediate_size: int = 11008
        num_hidden_layers: int = 32
        num_attention_heads: int = 32


Mistral3ForConditionalGeneration = LlavaForConditionalGeneration
