"""Tiny random checkpoints of MTP heads in several families' layouts, and their results."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import rms_norm

HIDDEN, VOCAB, TRUNK_LAYERS, MTP_LAYERS, EPS = 8, 12, 3, 2, 1e-6
Weights = dict[str, Tensor]


@dataclass(frozen=True)
class HeadFormat:
    """Tensor names of a layout; ``{i}`` is a layer's index in the head, ``{n}`` that after the
    trunk."""

    architecture: str
    embedding_norm: str
    hidden_norm: str
    projection: str
    block: str
    final_norm: str
    is_embedding_first: bool = True
    copies: tuple[str, ...] = ()

    def name(self, part: str, layer: int) -> str:
        return part.format(i=layer, n=TRUNK_LAYERS + layer)

    def random_weights(self) -> Weights:
        weights = {
            "model.embed_tokens.weight": torch.randn(VOCAB, HIDDEN),
            "model.norm.weight": torch.randn(HIDDEN),
            "lm_head.weight": torch.randn(VOCAB, HIDDEN),
        }
        for layer in range(MTP_LAYERS):
            for part, shape in self.shapes().items():
                weights[self.name(part, layer) + ".weight"] = torch.randn(shape)
        return weights

    def shapes(self) -> dict[str, tuple[int, ...]]:
        norms = [self.embedding_norm, self.hidden_norm, self.final_norm]
        norms += [self.block + name for name in ("input_layernorm", "post_attention_layernorm")]
        linears = [self.block + name for name in ("self_attn.o_proj", "mlp.down_proj")]
        shapes: dict[str, tuple[int, ...]] = dict.fromkeys(norms, (HIDDEN,))
        shapes |= dict.fromkeys(linears, (HIDDEN, HIDDEN))
        shapes |= dict.fromkeys(self.copies, (VOCAB, HIDDEN))
        return shapes | {self.projection: (HIDDEN, 2 * HIDDEN)}

    def logits(self, weights: Weights, layer: int, ids: Tensor, hidden: Tensor) -> Tensor:
        """[T], [T, HIDDEN] → [T, VOCAB], in the names and the order of the layout's own code."""

        def norm(part: str, x: Tensor) -> Tensor:
            return rms_norm(x, (HIDDEN,), weights[self.name(part, layer) + ".weight"], EPS)

        def linear(part: str, x: Tensor) -> Tensor:
            return x @ weights[self.name(part, layer) + ".weight"].T

        embedding = weights["model.embed_tokens.weight"][ids]
        both = [norm(self.embedding_norm, embedding), norm(self.hidden_norm, hidden)]
        ordered = both if self.is_embedding_first else both[::-1]
        x = linear(self.projection, torch.cat(ordered, -1))
        x = x + linear(self.block + "self_attn.o_proj", norm(self.block + "input_layernorm", x))
        after = norm(self.block + "post_attention_layernorm", x)
        x = x + linear(self.block + "mlp.down_proj", after)
        return norm(self.final_norm, x) @ weights["lm_head.weight"].T


def deepseek_v3(architecture: str, *copies: str) -> HeadFormat:
    layer = "model.layers.{n}."
    return HeadFormat(
        architecture,
        layer + "enorm",
        layer + "hnorm",
        layer + "eh_proj",
        layer,
        layer + "shared_head.norm",
        copies=tuple(layer + name for name in copies),
    )


MIMO = HeadFormat(
    "MiMoForCausalLM",
    "model.mtp_layers.{i}.token_layernorm",
    "model.mtp_layers.{i}.hidden_layernorm",
    "model.mtp_layers.{i}.input_proj",
    "model.mtp_layers.{i}.",
    "model.mtp_layers.{i}.final_layernorm",
    is_embedding_first=False,
)
ERNIE = HeadFormat(
    "Ernie4_5_MoeForCausalLM",
    "model.mtp_emb_norm.{i}",
    "model.mtp_hidden_norm.{i}",
    "model.mtp_linear_proj.{i}",
    "model.mtp_block.{i}.",
    "model.norm",
)
CHECKPOINTS = {
    "MiMo": MIMO,
    "DeepSeek-V3": deepseek_v3("DeepseekV3ForCausalLM", "embed_tokens", "shared_head.head"),
    "GLM-4.5": deepseek_v3("Glm4MoeForCausalLM", "embed_tokens", "shared_head.head"),
    "GLM-4.6": deepseek_v3("Glm4MoeForCausalLM"),
    "ERNIE-4.5": ERNIE,
}
