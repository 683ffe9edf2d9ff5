"""OLMo 2 (arXiv 2501.00656): the outputs of attention and MLP are normed, not their inputs."""

from torch import nn

from services.worker.config.model_config import ModelConfig
from services.worker.layers.attention import Attention
from services.worker.layers.ops import Ops, X
from services.worker.models.decoder import DecoderLM
from services.worker.models.parts import Parts


class Olmo2Layer(nn.Module):
    def __init__(self, parts: Parts, attention: Attention) -> None:
        super().__init__()
        self.self_attn = attention
        self.post_attention_layernorm = parts.norm()
        self.mlp = parts.mlp()
        self.post_feedforward_layernorm = parts.norm()

    def forward(self, ops: Ops[X], x: X) -> X:
        attended = self.self_attn.forward(ops, x)
        x = ops.norm(attended, self.post_attention_layernorm, residual=x)
        return ops.norm(self.mlp.forward(ops, x), self.post_feedforward_layernorm, residual=x)


class Olmo2ForCausalLM(DecoderLM):
    class Config(ModelConfig, frozen=True):
        attention_bias: bool = False

    config: Config

    def make_layer(self, parts: Parts, layer: int) -> Olmo2Layer:
        bias = self.config.attention_bias
        attention = parts.attention(layer, norm="tokens", has_qkv_bias=bias, has_out_bias=bias)
        return Olmo2Layer(parts, attention)
