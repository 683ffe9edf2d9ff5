"""GLM-4.1V to 4.6V (arXiv 2507.01006) and GLM-OCR: the text parts, a GLM-4 and, with experts, a
GLM-4.5. Their MTP heads are left out."""

from typing import ClassVar

import msgspec
from torch import nn

from services.worker.config.model_config import ModelConfig
from services.worker.layers.attention import Attention
from services.worker.layers.ops import Ops, X
from services.worker.media.image_experts import half
from services.worker.media.qwen2_5_vl import SECTION, AxesConfig
from services.worker.models.decoder import DecoderLM
from services.worker.models.glm4_moe import Glm4MoeForCausalLM
from services.worker.models.parts import Parts
from services.worker.weights.checkpoint import Checkpoint, TensorSource


class GlmConfig(AxesConfig, frozen=True, kw_only=True):
    rotates_partly: ClassVar[bool] = True

    @property
    def rope_section(self) -> list[int]:
        section: list[int] = self.rope_values.get(SECTION, [8, 12, 12])
        return section


class GlmLayer(nn.Module):
    """Norms its inputs and outputs."""

    def __init__(self, parts: Parts, attention: Attention) -> None:
        super().__init__()
        self.input_layernorm = parts.norm()
        self.self_attn = attention
        self.post_self_attn_layernorm = parts.norm()
        self.post_attention_layernorm = parts.norm()
        self.mlp = parts.mlp()
        self.post_mlp_layernorm = parts.norm()

    def forward(self, ops: Ops[X], x: X) -> X:
        attended = self.self_attn.forward(ops, x, norm=self.input_layernorm)
        x = ops.norm(attended, self.post_self_attn_layernorm, residual=x)
        given = self.mlp.forward(ops, x, norm=self.post_attention_layernorm)
        return ops.norm(given, self.post_mlp_layernorm, residual=x)


class Glm4vForConditionalGeneration(DecoderLM):
    Config = GlmConfig
    config: GlmConfig
    is_interleaved = True
    has_bias: ClassVar[bool] = True

    def make_layer(self, parts: Parts, layer: int) -> GlmLayer:
        return GlmLayer(parts, parts.attention(layer, has_qkv_bias=self.has_bias))


Glm46VForConditionalGeneration = Glm4vForConditionalGeneration


class GlmOcrForConditionalGeneration(Glm4vForConditionalGeneration):
    has_bias = False


class Glm4vMoeForConditionalGeneration(Glm4MoeForCausalLM):
    class Config(GlmConfig, Glm4MoeForCausalLM.Config, frozen=True, kw_only=True):
        attention_bias: bool = True
        num_nextn_predict_layers: int = msgspec.field(default=0, name="")  # not that of the file

    config: Config


class WholeMlps(Checkpoint):
    """A view of ``checkpoint`` whose gates and ups are one tensor."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__(checkpoint.folder, checkpoint.tensors)
        self._checkpoint = checkpoint

    def source(self, name: str) -> TensorSource:
        for number, part in enumerate((".mlp.gate_proj.", ".mlp.up_proj.")):
            if part in name:
                whole = self._checkpoint.source(name.replace(part, ".mlp.gate_up_proj."))
                return whole._replace(transform=half(number))
        return self._checkpoint.source(name)


def view(checkpoint: Checkpoint, config: ModelConfig) -> Checkpoint:
    """``checkpoint`` by our names."""
    return WholeMlps(checkpoint)
