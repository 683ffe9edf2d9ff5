"""GLM-4.1V to 4.6V (arXiv 2507.01006) and GLM-OCR: the text parts, a GLM-4 and, with experts, a
GLM-4.5. Their MTP heads are left out."""

from typing import ClassVar

import msgspec

from services.worker.config.model_config import ModelConfig
from services.worker.media.image_experts import half
from services.worker.media.qwen_vl import SECTION, AxesConfig
from services.worker.models.decoder import DecoderLM
from services.worker.models.gemma import SandwichLayer
from services.worker.models.glm4_moe import Glm4MoeForCausalLM
from services.worker.models.parts import Parts
from services.worker.weights.checkpoint import Checkpoint, TensorSource

NAMES = {
    ".mlp.gate_proj.": TensorSource(".mlp.gate_up_proj.", half(0)),
    ".mlp.up_proj.": TensorSource(".mlp.gate_up_proj.", half(1)),
    ".post_attention_layernorm.": TensorSource(".post_self_attn_layernorm."),
    ".pre_feedforward_layernorm.": TensorSource(".post_attention_layernorm."),
    ".post_feedforward_layernorm.": TensorSource(".post_mlp_layernorm."),
}


class GlmConfig(AxesConfig, frozen=True, kw_only=True):
    rotates_partly: ClassVar[bool] = True

    @property
    def rope_section(self) -> list[int]:
        section: list[int] = self.rope_values.get(SECTION, [8, 12, 12])
        return section


class Glm4vForConditionalGeneration(DecoderLM):
    Config = GlmConfig
    config: GlmConfig
    is_interleaved = True
    has_bias: ClassVar[bool] = True

    def make_layer(self, parts: Parts, layer: int) -> SandwichLayer:
        return SandwichLayer(parts, parts.attention(layer, has_qkv_bias=self.has_bias), "silu")


Glm46VForConditionalGeneration = Glm4vForConditionalGeneration


class GlmOcrForConditionalGeneration(Glm4vForConditionalGeneration):
    has_bias = False


class Glm4vMoeForConditionalGeneration(Glm4MoeForCausalLM):
    class Config(GlmConfig, Glm4MoeForCausalLM.Config, frozen=True, kw_only=True):
        attention_bias: bool = True
        num_nextn_predict_layers: int = msgspec.field(default=0, name="")  # not that of the file

    config: Config


class GlmNames(Checkpoint):
    """A view of ``checkpoint``: gates and ups are one tensor, and norms have other names."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__(checkpoint.folder, checkpoint.tensors)
        self._checkpoint = checkpoint

    def source(self, name: str) -> TensorSource:
        for ours, theirs in NAMES.items():
            if ours in name:
                found = self._checkpoint.source(name.replace(ours, theirs.name))
                return found._replace(transform=theirs.transform)
        return self._checkpoint.source(name)


def view(checkpoint: Checkpoint, config: ModelConfig) -> Checkpoint:
    """``checkpoint`` by our names."""
    return GlmNames(checkpoint)
