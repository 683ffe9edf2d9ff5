"""A decoder by the operators of ``kernels``: torch's on CPUs, Triton's on GPUs.

On a GPU they leave the host nothing to know but how many tokens there are, so that a graph of them
can be captured.
"""

from collections.abc import Set
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from kernels.codes import Codes
from kernels.experts import experts as expert_products
from kernels.linear import gated as gated_product
from kernels.linear import linear as product
from kernels.paged_attention import AttentionOptions, attend
from kernels.rms_norm import Norm, rms_norm
from kernels.rope_kv import rope_kv
from kernels.route import route
from services.worker.backends.check import check_model
from services.worker.layers.context import current_context
from services.worker.layers.embedding import Embedding, LMHead
from services.worker.layers.experts import Experts, Scores
from services.worker.layers.heads import Heads
from services.worker.layers.linear import Linear
from services.worker.layers.norm import RMSNorm
from services.worker.layers.offloaded import OffloadedLayers
from services.worker.layers.ops import Ops
from services.worker.layers.rope import RotaryEmbedding
from services.worker.layers.weights import Dense, Quantized
from services.worker.models import TorchCausalLM
from services.worker.models.decoder import DecoderLM, MtpHead


@dataclass(frozen=True, slots=True)
class Known:
    """The options of AttentionSpec, and the forms of weights, that operators take."""

    options: Set[str]
    forms: Set[type]


# In steps that the host prepared, and in those whose lengths only the device knows.
HOST = Known({"norm", "is_interleaved", "window"}, {Dense, Quantized})
DEVICE = Known({"norm", "is_interleaved", "window"}, {Dense, Quantized})


class TorchOps(Ops[Tensor]):
    """Operators on the tokens of a step, which are at ``positions`` [T]. Logits come in ``out``
    [S, vocab_size] float32, if there is one. Layers whose weights are ``offloaded`` wait for
    them."""

    def __init__(
        self,
        positions: Tensor | None = None,
        out: Tensor | None = None,
        offloaded: OffloadedLayers | None = None,
    ) -> None:
        self._positions = positions
        self._out = out
        self._offloaded = offloaded
        self._rotations: dict[RotaryEmbedding, Tensor] = {}  # computed once for all layers

    def enter(self, layer: nn.Module) -> None:
        if self._offloaded is not None:
            self._offloaded.enter(layer)

    def embed(self, ids: Tensor, embedding: Embedding) -> Tensor:
        return functional.embedding(ids, embedding.weight)

    def scale(self, x: Tensor, factor: float) -> Tensor:
        return x * factor

    def norm(self, x: Tensor, norm: RMSNorm, *, residual: Tensor | None = None) -> Tensor:
        normed = rms_norm(x, norm.weight, norm.eps)
        return normed if residual is None else residual + normed

    def linear(
        self,
        x: Tensor,
        linear: Linear,
        *,
        norm: RMSNorm | None = None,
        residual: Tensor | None = None,
        scale: float = 1.0,
    ) -> Tensor:
        weight, bias, operand = _weight(linear), linear.bias, _operand(norm)
        if scale == 1.0:
            return product(x, weight, bias, norm=operand, residual=residual)
        scaled = product(x, weight, bias, norm=operand) * scale
        return scaled if residual is None else residual + scaled

    def gated(self, x: Tensor, gate_up: Linear, *, norm: RMSNorm | None = None) -> Tensor:
        return gated_product(x, _weight(gate_up), gate_up.bias, norm=_operand(norm))

    def experts(
        self, x: Tensor, experts: Experts, *, residual: Tensor, scale: float = 1.0
    ) -> Tensor:
        gate, products = experts.gate, experts.products
        logits = product(x.float(), gate.weight, gate.bias)
        chosen, weights = route(logits, gate.routing, gate.e_score_correction_bias)
        gate_up, down = experts.stacks or (
            [_weight(each.gate_up_proj) for each in products],
            [_weight(each.down_proj) for each in products],
        )
        shares = weights if scale == 1.0 else weights * scale
        return expert_products(x, chosen, shares, gate_up, down, residual=residual)

    def open(self, x: Tensor, gate: Scores, *, y: Tensor, residual: Tensor) -> Tensor:
        openings = product(x.float(), gate.weight).sigmoid()
        return (residual + openings * y).to(y.dtype)

    def attend(self, x: Tensor, heads: Heads) -> Tensor:
        context, spec = current_context(), heads.spec
        kv = context.kv_caches[heads.layer]
        query = rope_kv(
            x,
            _operand(heads.query_norm),
            _operand(heads.key_norm),
            self._rotation(heads.rotary),
            context.slot_mapping,
            kv.entries,
            spec.is_interleaved,
            kv.scales,
        )
        options = AttentionOptions(window=spec.window)
        attended = attend(query, kv.entries, context.attention, spec.scale, options, kv.scales)
        return attended.flatten(1)

    def logits(
        self, x: Tensor, head: LMHead, *, norm: RMSNorm | None = None, scale: float = 1.0
    ) -> Tensor:
        weight, dtype = head.weight.values, torch.float32
        logits = product(x, weight, norm=_operand(norm), out_dtype=dtype, out=self._out)
        return logits if scale == 1.0 else logits.mul_(scale)

    def _rotation(self, rotary: RotaryEmbedding) -> Tensor:
        """[2, T, head_dim]"""
        if rotary not in self._rotations:
            assert self._positions is not None
            self._rotations[rotary] = rotary(self._positions)
        return self._rotations[rotary]


def _weight(linear: Linear) -> Tensor | Codes:
    weight = linear.weight
    return weight.values if isinstance(weight, Dense) else weight.as_codes


def _operand(norm: RMSNorm | None) -> Norm | None:
    return None if norm is None else Norm(norm.weight, norm.eps)


class TorchLM(TorchCausalLM):
    """Computes ``model`` with its own weights. Raises NotSupported where ``check_model`` does."""

    def __init__(self, model: DecoderLM, known: Known = HOST) -> None:
        super().__init__()
        check_model(model, known.options, known.forms)
        self.model = model
        self.offloaded = model.offloaded
        self.hidden_size, self.vocab_size = model.config.hidden_size, model.lm_head.outputs
        if model.mtp_head is not None:
            self.draft_head = _TorchDraftHead(model.mtp_head)

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        return self.model.forward(TorchOps(positions, offloaded=self.offloaded), input_ids)

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        return self.model.logits(TorchOps(out=out), hidden)


class _TorchDraftHead:
    def __init__(self, head: MtpHead) -> None:
        self._head = head

    def first_state(self, hidden: Tensor) -> Tensor:
        return self._head.first_state(TorchOps(), hidden)

    def forward(self, state: Tensor, input_ids: Tensor, positions: Tensor) -> Tensor:
        return self._head.forward(TorchOps(positions), state, input_ids)

    def logits(self, out: Tensor) -> Tensor:
        return self._head.logits(TorchOps(), out)
