"""Qwen2 and Qwen3 (arXiv 2407.10671, 2505.09388): windows in some layers. Qwen2 has biases on
queries, keys and values; Qwen3 norms queries and keys head by head."""

from services.worker.config.model_config import ModelConfig, Window
from services.worker.models.decoder import DecoderLayer, DecoderLM
from services.worker.models.parts import Parts


class WindowsConfig(ModelConfig, frozen=True):
    use_sliding_window: bool = False
    sliding_window: Window = 4096
    max_window_layers: int = 28
    layer_types: list[str] | None = None

    def window(self, layer: int) -> int | None:
        """The number of last keys that a token sees in the trunk's ``layer``; None: all."""
        if not self.use_sliding_window:
            return None
        if not self.layer_types:
            return self.sliding_window if layer >= self.max_window_layers else None
        return self.sliding_window if self.layer_types[layer] == "sliding_attention" else None

    def problems(self) -> list[str]:
        problems, kinds = super().problems(), self.layer_types or []
        if unknown := {*kinds} - {"full_attention", "sliding_attention"}:
            problems.append(
                f"layer_types {', '.join(sorted(unknown))} is not supported; only full_attention"
                " and sliding_attention are"
            )
        if self.use_sliding_window and kinds and len(kinds) != self.num_hidden_layers:
            problems.append(
                f"layer_types has {len(kinds)} entries; num_hidden_layers is"
                f" {self.num_hidden_layers}"
            )
        return problems


class Qwen2ForCausalLM(DecoderLM):
    Config = WindowsConfig
    config: WindowsConfig

    def make_layer(self, parts: Parts, layer: int) -> DecoderLayer:
        window = self.config.window(layer)
        attention = parts.attention(layer, window=window, has_qkv_bias=True)
        return DecoderLayer(parts, attention, parts.mlp())


class Qwen3ForCausalLM(DecoderLM):
    class Config(WindowsConfig, frozen=True):
        attention_bias: bool = False

    config: Config

    def make_layer(self, parts: Parts, layer: int) -> DecoderLayer:
        bias, window = self.config.attention_bias, self.config.window(layer)
        attention = parts.attention(
            layer, norm="heads", window=window, has_qkv_bias=bias, has_out_bias=bias
        )
        return DecoderLayer(parts, attention, parts.mlp())
