"""Text parts that differ from a family in a few lines: of Gemma 3, InternVL 3 and 3.5 (arXiv
2504.10479, 2508.18265), LightOnOCR (2601.14251), LLaVA, Mistral 3, PaddleOCR-VL (2510.14528),
Pixtral and Qianfan-OCR."""

from typing import Literal

import msgspec

from services.worker.config.model_config import Num, Window
from services.worker.media.qwen_vl import AxesConfig
from services.worker.models.decoder import DecoderLayer
from services.worker.models.ernie4_5 import Ernie4_5ForCausalLM
from services.worker.models.gemma import Gemma3ForCausalLM
from services.worker.models.llama import MistralForCausalLM
from services.worker.models.parts import Parts
from services.worker.models.qwen import Qwen3ForCausalLM


class LlavaForConditionalGeneration(MistralForCausalLM):
    class Config(MistralForCausalLM.Config, frozen=True, kw_only=True):
        model_type: Literal["llama", "mistral"] = "llama"
        hidden_size: Num = 4096  # as files of 7B leave these out
        intermediate_size: int = 11008
        num_hidden_layers: Num = 32
        num_attention_heads: Num = 32


Mistral3ForConditionalGeneration = LlavaForConditionalGeneration


class Gemma3ForConditionalGeneration(Gemma3ForCausalLM):
    class Config(Gemma3ForCausalLM.Config, frozen=True, kw_only=True):
        vocab_size: Num = 262_208  # as files leave out what transformers' defaults have
        hidden_size: Num = 2304
        intermediate_size: int = 9216
        num_hidden_layers: Num = 26
        num_attention_heads: Num = 8
        num_kv_heads: int | None = msgspec.field(default=4, name="num_key_value_heads")
        max_position_embeddings: Num = 131_072
        rms_norm_eps: float = 1e-6
        sliding_window: Window = 4096

    config: Config


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
LightOnOcrForConditionalGeneration = Qwen3ForCausalLM


class PaddleOCRVLForConditionalGeneration(Ernie4_5ForCausalLM):
    class Config(AxesConfig, Ernie4_5ForCausalLM.Config, frozen=True):
        pass

    config: Config
    is_interleaved = False
