"""LLaVA 1.5 (arXiv 2310.03744) and Pixtral (arXiv 2410.07073): the text part, a Llama or a
Mistral."""

from services.worker.config.model_config import ModelConfig, Window
from services.worker.models.decoder import DecoderLayer, DecoderLM
from services.worker.models.parts import Parts

KINDS = ("llama", "mistral")


class LlavaConfig(ModelConfig, frozen=True, kw_only=True):
    """Published files leave out sizes of 7B."""

    model_type: str = "llama"
    hidden_size: int = 4096
    intermediate_size: int = 11008
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    attention_bias: bool = False
    mlp_bias: bool = False
    sliding_window: Window = 4096  # of a Mistral

    def problems(self) -> list[str]:
        problems = super().problems()
        if self.model_type not in KINDS:
            problems.append(
                f"a text_config of the model_type {self.model_type!r} is not supported; only"
                f" {' and '.join(KINDS)} are"
            )
        return problems


class LlavaForConditionalGeneration(DecoderLM):
    Config = LlavaConfig
    config: LlavaConfig

    def make_layer(self, parts: Parts, layer: int) -> DecoderLayer:
        config = self.config
        window = config.sliding_window if config.model_type == "mistral" else None
        bias = config.attention_bias
        attention = parts.attention(layer, window=window, has_qkv_bias=bias, has_out_bias=bias)
        return DecoderLayer(parts, attention, parts.mlp(config.mlp_bias))
