"""The places of MTP heads in checkpoints of several families, and their conversion to ours.

Our names and order are MiMo's: ``input_proj`` takes the hidden state first, then the embedding. The
other families take the embedding first. The tensors of attention and MLP keep their names.
Sources: README_WEIGHTS.md of DeepSeek-V3; deepseek_mtp, glm4_moe_mtp, ernie_mtp and mimo_mtp of
vLLM; ernie4_5_mtp of FastDeploy; qwen3_next_mtp of vLLM.
"""

import logging
import re
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor

from services.worker.config.model_config import ModelConfig
from services.worker.weights.checkpoint import Checkpoint, TensorSource

log = logging.getLogger(__name__)

FIRST_LAYER = "model.mtp_layers.0"
OUR_NAME = re.compile(r"model\.mtp_layers\.(?P<layer>\d+)\.(?P<part>.+)")


def hidden_first(weight: Tensor) -> Tensor:
    """[hidden, 2·hidden] with the embedding's columns first → with the hidden state's first."""
    embedding, hidden = weight.tensor_split(2, dim=-1)
    return torch.cat([hidden, embedding], dim=-1)


def ernie_hidden_first(weight: Tensor) -> Tensor:
    """The same; conversions from before September 2025 left the weight [2·hidden, hidden]."""
    is_transposed = weight.shape[0] > weight.shape[-1]
    return hidden_first(weight.T if is_transposed else weight)


class Layout(NamedTuple):
    """A family's places of our tensors and modules, by our names after a layer's prefix.

    ``{i}`` is a layer's place in the head, ``{n}`` its place when the trunk's layers count too.
    The tensors in ``copies`` repeat tensors of the trunk.
    """

    parts: dict[str, TensorSource]
    copies: re.Pattern[str] | None = None


BLOCK = ("input_layernorm", "self_attn", "post_attention_layernorm", "mlp")

# Copies are in DeepSeek-V3 and GLM-4.5; GLM-4.6 leaves them out.
DEEPSEEK_V3 = Layout(
    {
        "token_layernorm": TensorSource("model.layers.{n}.enorm"),
        "hidden_layernorm": TensorSource("model.layers.{n}.hnorm"),
        "input_proj.weight": TensorSource("model.layers.{n}.eh_proj.weight", hidden_first),
        "final_layernorm": TensorSource("model.layers.{n}.shared_head.norm"),
        **{part: TensorSource(f"model.layers.{{n}}.{part}") for part in BLOCK},
    },
    copies=re.compile(r"model\.layers\.\d+\.(shared_head\.head|embed_tokens)\.\w+"),
)

# Has no final_layernorm: the trunk's last norm, model.norm, is the head's too.
ERNIE4_5 = Layout(
    {
        "token_layernorm": TensorSource("model.mtp_emb_norm.{i}"),
        "hidden_layernorm": TensorSource("model.mtp_hidden_norm.{i}"),
        "input_proj.weight": TensorSource("model.mtp_linear_proj.{i}.weight", ernie_hidden_first),
        **{part: TensorSource(f"model.mtp_block.{{i}}.{part}") for part in BLOCK},
    }
)

QWEN3_NEXT = Layout(
    {
        "token_layernorm": TensorSource("mtp.pre_fc_norm_embedding"),
        "hidden_layernorm": TensorSource("mtp.pre_fc_norm_hidden"),
        "input_proj.weight": TensorSource("mtp.fc.weight", hidden_first),
        "final_layernorm": TensorSource("mtp.norm"),
        **{part: TensorSource(f"mtp.layers.{{i}}.{part}") for part in BLOCK},
    }
)

LAYOUTS = {
    "DeepseekV3ForCausalLM": DEEPSEEK_V3,
    "DeepseekV32ForCausalLM": DEEPSEEK_V3,
    "Ernie4_5_MoeForCausalLM": ERNIE4_5,
    "Ernie4_5_VLMoeForConditionalGeneration": ERNIE4_5,
    "Glm4MoeForCausalLM": DEEPSEEK_V3,
    "GlmMoeDsaForCausalLM": DEEPSEEK_V3,
    "Qwen3NextForCausalLM": QWEN3_NEXT,
    "Qwen3_5ForCausalLM": QWEN3_NEXT,
    "Qwen3_5ForConditionalGeneration": QWEN3_NEXT,
    "Qwen3_5MoeForCausalLM": QWEN3_NEXT,
    "Qwen3_5MoeForConditionalGeneration": QWEN3_NEXT,
}


class MtpView(Checkpoint):
    """``checkpoint`` with an MTP head after a trunk of ``num_trunk_layers``, in our names and
    without its copies of the trunk."""

    def __init__(self, checkpoint: Checkpoint, layout: Layout, num_trunk_layers: int) -> None:
        tensors = checkpoint.tensors
        if copies := layout.copies:
            tensors = {name: tensors[name] for name in tensors if not copies.fullmatch(name)}
        super().__init__(checkpoint.folder, tensors)
        self._checkpoint = checkpoint
        self._layout = layout
        self._num_trunk_layers = num_trunk_layers

    def source(self, name: str) -> TensorSource:
        if found := OUR_NAME.fullmatch(name):
            i, part = int(found["layer"]), f"{found['part']}."
            for ours, (theirs, transform) in self._layout.parts.items():
                if part.startswith(f"{ours}."):
                    theirs = theirs.format(i=i, n=self._num_trunk_layers + i)
                    return TensorSource(theirs + found["part"].removeprefix(ours), transform)
        return self._checkpoint.source(name)


def with_mtp_head(checkpoint: Checkpoint, config: ModelConfig) -> Checkpoint:
    """``checkpoint`` with our names for its MTP head, if its family has others."""
    for name in config.architectures:
        if layout := LAYOUTS.get(name):
            return MtpView(checkpoint, layout, config.num_hidden_layers)
    return checkpoint


def without_missing_head(config: ModelConfig, checkpoint: Checkpoint) -> ModelConfig:
    """``config`` without an MTP head if ``checkpoint`` has none: tools that quantize or train a
    model often leave the head out, and its count stays in config.json."""
    wanted = getattr(config, "num_nextn_predict_layers", 0)
    if not wanted or checkpoint.find(f"{FIRST_LAYER}.hidden_layernorm.weight"):
        return config
    log.info("the checkpoint lacks the model's MTP head: there are no drafts by it")
    return msgspec.structs.replace(config, num_nextn_predict_layers=0)
