"""Where checkpoints of several families keep their MTP heads, and how those become ours.

Ours are MiMo's names, and its order: ``input_proj`` takes the hidden state first, the embedding
behind it. The others take the embedding first. What attention and MLP are made of keeps its names.
Sources: README_WEIGHTS.md of DeepSeek-V3; deepseek_mtp, glm4_moe_mtp, ernie_mtp and mimo_mtp of
vLLM; ernie4_5_mtp of FastDeploy.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from services.worker.config.model_config import ModelConfig
from shared.errors import ConfigError

Transform = Callable[[Tensor], Tensor]


def as_it_is(tensor: Tensor) -> Tensor:
    return tensor


def hidden_first(weight: Tensor) -> Tensor:
    """[hidden, 2·hidden] with the embedding's columns first → with the hidden state's first."""
    embedding, hidden = weight.tensor_split(2, dim=-1)
    return torch.cat([hidden, embedding], dim=-1)


def ernie_hidden_first(weight: Tensor) -> Tensor:
    """The same; conversions from before September 2025 left the weight [2·hidden, hidden]."""
    is_transposed = weight.shape[0] > weight.shape[-1]
    return hidden_first(weight.T if is_transposed else weight)


class MappedTensor(NamedTuple):
    """What a tensor of a checkpoint is to us; a copy repeats one of the trunk's."""

    name: str
    transform: Transform = as_it_is
    is_copy: bool = False


def own(name: str, transform: Transform = as_it_is) -> MappedTensor:
    return MappedTensor("model.mtp_layers.{i}." + name, transform)


class Family(NamedTuple):
    """Tensors, and modules with all that is in them, by their names behind ``prefix``.

    ``{i}`` is a layer's place in the head, ``{n}`` its place when the trunk's layers count too.
    """

    prefix: str
    parts: dict[str, MappedTensor]


BLOCK = ("input_layernorm", "self_attn", "post_attention_layernorm", "mlp")
HEAD = ("token_layernorm", "hidden_layernorm", "input_proj.weight", "final_layernorm")

MIMO = Family("model.mtp_layers.{i}.", {name: own(name) for name in HEAD + BLOCK})

# Copies are in DeepSeek-V3 and GLM-4.5; GLM-4.6 leaves them out.
DEEPSEEK_V3 = Family(
    "model.layers.{n}.",
    {
        "enorm": own("token_layernorm"),
        "hnorm": own("hidden_layernorm"),
        "eh_proj.weight": own("input_proj.weight", hidden_first),
        "shared_head.norm": own("final_layernorm"),
        "shared_head.head": MappedTensor("lm_head", is_copy=True),
        "embed_tokens": MappedTensor("model.embed_tokens", is_copy=True),
        **{name: own(name) for name in BLOCK},
    },
)

# Has no final_layernorm: the trunk's last norm, model.norm, is the head's too.
ERNIE4_5 = Family(
    "model.mtp_",
    {
        "emb_norm.{i}": own("token_layernorm"),
        "hidden_norm.{i}": own("hidden_layernorm"),
        "linear_proj.{i}.weight": own("input_proj.weight", ernie_hidden_first),
        **{f"block.{{i}}.{name}": own(name) for name in BLOCK},
    },
)

FAMILIES = {
    "DeepseekV3ForCausalLM": DEEPSEEK_V3,
    "Ernie4_5_MoeForCausalLM": ERNIE4_5,
    "Glm4MoeForCausalLM": DEEPSEEK_V3,
    "MiMoForCausalLM": MIMO,
}


class MtpLayout:
    """The tensors of an MTP head of ``num_layers`` behind a trunk of ``num_trunk_layers``."""

    def __init__(self, family: Family, num_trunk_layers: int, num_layers: int) -> None:
        self.num_layers = num_layers
        self._prefixes: tuple[str, ...] = ()
        self._parts: dict[str, MappedTensor] = {}
        for i in range(num_layers):
            n = num_trunk_layers + i
            self._prefixes += (family.prefix.format(i=i, n=n),)
            for theirs, ours in family.parts.items():
                part = ours._replace(name=ours.name.format(i=i))
                self._parts[(family.prefix + theirs).format(i=i, n=n)] = part

    def renamed(self, name: str) -> MappedTensor | None:
        """None for what is not of the head. Raises ConfigError for what we do not know of it."""
        if not name.startswith(self._prefixes):
            return None
        for theirs, ours in self._parts.items():
            if f"{name}.".startswith(f"{theirs}."):
                return ours._replace(name=ours.name + name.removeprefix(theirs))
        raise ConfigError(f"model: no MTP head that we know has a tensor {name}")


def mtp_layout(config: ModelConfig) -> MtpLayout | None:
    """None where the architecture has no MTP head that we know."""
    for name in config.architectures:
        if family := FAMILIES.get(name):
            num_layers = getattr(config, "num_nextn_predict_layers", 0)
            return MtpLayout(family, config.num_hidden_layers, num_layers)
    return None
