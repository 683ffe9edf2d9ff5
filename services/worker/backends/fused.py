"""A decoder on fused operators, for GPUs, which uses the weights of a DecoderLM without a copy.

They leave the host nothing to know but how many tokens there are, so that a graph of them can be
captured.
"""

from typing import cast

import torch
from torch import Tensor, nn

from kernels.linear import gated, linear
from kernels.paged_attention import DeviceAttention, attend
from kernels.rms_norm import Norm
from kernels.rope_kv import rope_kv
from services.worker.layers.attention import Attention, QKNorm
from services.worker.layers.context import current_context
from services.worker.layers.norm import RMSNorm
from services.worker.models import CausalLM
from services.worker.models.decoder import DecoderLayer, DecoderLM
from services.worker.models.mimo import MiMoForCausalLM


class FusedLM(CausalLM):
    """Computes what ``model`` does, and rounds elsewhere on the way.

    The attention of its context is a DeviceAttention.
    """

    clears_blocks = False

    def __init__(self, model: DecoderLM) -> None:
        nn.Module.__init__(self)
        self.decoder = model
        self.has_mtp = model.has_mtp

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        trunk = self.decoder.model
        x: Tensor = trunk.embed_tokens(input_ids)
        for layer in trunk.layers:
            x = self._layer(cast(DecoderLayer, layer), x, positions)
        return x

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """In ``out`` [S, vocab_size] float32, if there is one."""
        return self._logits(hidden, self.decoder.model.norm, out)

    def mtp(self, hidden: Tensor, input_ids: Tensor, positions: Tensor) -> Tensor:
        """The product with hidden state and embedding, one behind the other, is the sum of the
        products with either."""
        layer = cast(MiMoForCausalLM, self.decoder).mtp_layer
        of_hidden, of_token = torch.split(layer.input_proj.weight, hidden.shape[1], 1)
        embedded = self.decoder.model.embed_tokens(input_ids)
        x = linear(hidden, of_hidden, norm=_norm(layer.hidden_layernorm))
        x = linear(embedded, of_token, norm=_norm(layer.token_layernorm), residual=x)
        return self._layer(layer, x, positions)

    def mtp_logits(self, out: Tensor) -> Tensor:
        return self._logits(out, cast(MiMoForCausalLM, self.decoder).mtp_layer.final_layernorm)

    def _layer(self, layer: DecoderLayer, x: Tensor, positions: Tensor) -> Tensor:
        """[T, hidden] → [T, hidden]"""
        attention, mlp = layer.self_attn, layer.mlp
        qkv, out = attention.qkv_proj, attention.o_proj
        heads = linear(x, qkv.weight, qkv.bias, norm=_norm(layer.input_layernorm))
        attended = self._attend(attention, heads, positions)
        x = linear(attended, out.weight, out.bias, residual=x)
        gate_up, down = mlp.gate_up_proj, mlp.down_proj
        inner = gated(x, gate_up.weight, gate_up.bias, norm=_norm(layer.post_attention_layernorm))
        return linear(inner, down.weight, down.bias, residual=x)

    def _attend(self, attention: Attention, heads: Tensor, positions: Tensor) -> Tensor:
        """[T, (H + 2 H_kv) * D] → [T, H * D]; writes the KV of the T tokens first."""
        context, rotary = current_context(), self.decoder.model.rotary
        kv_cache = context.kv_caches[attention.layer]
        query = rope_kv(
            heads,
            *_head_norms(attention),
            rotary.table,
            positions,
            context.slot_mapping,
            kv_cache,
            rotary.is_interleaved,
        )
        rows = cast(DeviceAttention, context.attention)
        return attend(query, kv_cache, rows, attention.head_dim**-0.5).flatten(1)

    def _logits(self, x: Tensor, norm: RMSNorm, out: Tensor | None = None) -> Tensor:
        weight = self.decoder.lm_head.weight
        return linear(x, weight, norm=_norm(norm), out_dtype=torch.float32, out=out)


def _norm(norm: RMSNorm) -> Norm:
    return Norm(norm.weight, norm.eps)


def _head_norms(attention: Attention) -> tuple[Tensor | None, Tensor | None, float]:
    """Weights of the norms of queries and of keys, if the model has them, and their epsilon."""
    norms = attention.qk_norm
    if isinstance(norms, QKNorm):
        return norms.query_weight, norms.key_weight, norms.eps
    return None, None, 0.0
