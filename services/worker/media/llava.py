"""The text parts of LLaVA, Pixtral and Mistral 3: a Llama or a Mistral."""

from typing import Literal

from services.worker.models.llama import MistralForCausalLM


class LlavaForConditionalGeneration(MistralForCausalLM):
    class Config(MistralForCausalLM.Config, frozen=True, kw_only=True):
        model_type: Literal["llama", "mistral"] = "llama"
        hidden_size: int = 4096  # as files of 7B leave these out
        intermediate_size: int = 11008
        num_hidden_layers: int = 32
        num_attention_heads: int = 32


Mistral3ForConditionalGeneration = LlavaForConditionalGeneration
