"""Mistral (arXiv 2310.06825): a token sees a window of the last keys."""

from services.worker.config.model_config import ModelConfig, Window
from services.worker.models.decoder import DecoderLayer, DecoderLM
from services.worker.models.parts import Parts


class MistralForCausalLM(DecoderLM):
    class Config(ModelConfig, frozen=True):
        sliding_window: Window = 4096

    config: Config

    def make_layer(self, parts: Parts, layer: int) -> DecoderLayer:
        attention = parts.attention(layer, window=self.config.sliding_window)
        return DecoderLayer(parts, attention, parts.mlp())
