"""ERNIE 4.5, dense (technical report of June 2025): rotated pairs are neighbours."""

from services.worker.config.model_config import ModelConfig
from services.worker.models.decoder import DecoderLayer, DecoderLM
from services.worker.models.parts import Parts


class Ernie4_5ForCausalLM(DecoderLM):  # noqa: N801, its name in config.json
    class Config(ModelConfig, frozen=True):
        rope_theta: float | None = 500000.0
        tie_word_embeddings: bool | None = True
        use_bias: bool = False

    config: Config
    is_interleaved = True

    def make_layer(self, parts: Parts, layer: int) -> DecoderLayer:
        bias = self.config.use_bias
        attention = parts.attention(layer, has_qkv_bias=bias, has_out_bias=bias)
        return DecoderLayer(parts, attention, parts.mlp(bias))


Ernie4_5_ForCausalLM = Ernie4_5ForCausalLM  # in folders of Paddle
