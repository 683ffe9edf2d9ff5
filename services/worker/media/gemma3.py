"""The text part of Gemma 3 with images. Its config leaves out what transformers' defaults have."""

import msgspec

from services.worker.config.model_config import Window
from services.worker.models import gemma3


class Gemma3ForConditionalGeneration(gemma3.Gemma3ForCausalLM):
    class Config(gemma3.Gemma3ForCausalLM.Config, frozen=True, kw_only=True):
        vocab_size: int = 262_208
        hidden_size: int = 2304
        intermediate_size: int = 9216
        num_hidden_layers: int = 26
        num_attention_heads: int = 8
        num_kv_heads: int | None = msgspec.field(default=4, name="num_key_value_heads")
        max_position_embeddings: int = 131_072
        rms_norm_eps: float = 1e-6
        sliding_window: Window = 4096

    config: Config
