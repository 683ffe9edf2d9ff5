"""A decoder on native CPU code: the weights of a DecoderLM, packed."""

import ctypes
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding

from kernels.cpu.decoder import (
    DecoderShape,
    LayerWeights,
    NativeDecoder,
    NativeLibrary,
    PackedMatrix,
    address,
    gate_up_order,
)
from kernels.paged_attention import AttentionBatch
from services.worker.layers.attention import QKNorm
from services.worker.layers.context import current_context
from services.worker.layers.linear import Linear
from services.worker.models import CausalLM
from services.worker.models.decoder import DecoderLayer, DecoderLM
from services.worker.models.mimo import MiMoForCausalLM, MtpLayer


def decoder_shape(model: DecoderLM, block_size: int) -> DecoderShape:
    config, rotary = model.config, model.model.rotary
    cos, sin = rotary.table
    return DecoderShape(
        config.hidden_size,
        config.intermediate_size,
        config.num_attention_heads,
        config.num_key_value_heads,
        config.head_dim,
        rotary.is_interleaved,
        block_size,
        config.rms_norm_eps,
        cos,
        sin,
    )


class NativeLM(CausalLM):
    """Takes the weights out of ``model``, layer by layer, so that only one is there twice."""

    clears_blocks = False

    def __init__(self, model: DecoderLM, shape: DecoderShape, library: NativeLibrary) -> None:
        nn.Module.__init__(self)
        self._library = library
        self._shape = shape
        trunk = model.model
        self._norm = trunk.norm.weight.float()
        is_tied = model.lm_head.source == "model.embed_tokens.weight"
        self.embedding = None if is_tied else trunk.embed_tokens.weight
        self._head = library.pack(model.lm_head.weight)
        del model.lm_head, trunk.embed_tokens
        layers = []
        while len(trunk.layers):
            layer = cast(DecoderLayer, trunk.layers.pop(0))
            layers.append(_pack_layer(library, layer, shape.intermediate_size))
        self._num_layers = len(layers)
        self._decoder = NativeDecoder(library, shape, layers)
        self._keep([self._norm, shape.cos, shape.sin, *self._head.tensors])
        for packed in layers:
            self._keep(packed.tensors)
        self.has_mtp = isinstance(model, MiMoForCausalLM) and model.has_mtp
        if isinstance(model, MiMoForCausalLM) and model.has_mtp:
            self._mtp = _Mtp(library, shape, model.mtp_layer)
            self._keep(self._mtp.tensors)

    def _keep(self, tensors: list[Tensor]) -> None:
        """As buffers, so that they are counted as the model's."""
        for tensor in tensors:
            self.register_buffer(f"packed_{len(self._buffers)}", tensor, persistent=False)

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        """Hidden states are float32."""
        x = self._embed(input_ids)
        context = current_context()
        rows = cast(AttentionBatch, context.attention)
        caches = context.kv_caches[: self._num_layers]
        self._decoder.run(x, positions, context.slot_mapping, rows, caches)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        return self._product(hidden, self._norm, self._head)

    def mtp(self, hidden: Tensor, input_ids: Tensor, positions: Tensor) -> Tensor:
        mtp, embedded = self._mtp, self._embed(input_ids)
        x = self._product(hidden, mtp.hidden_norm, mtp.hidden_proj)
        x += self._product(embedded, mtp.token_norm, mtp.token_proj)
        context = current_context()
        rows = cast(AttentionBatch, context.attention)
        caches = context.kv_caches[self._num_layers :]
        mtp.decoder.run(x, positions, context.slot_mapping, rows, caches)
        return x

    def mtp_logits(self, out: Tensor) -> Tensor:
        return self._product(out, self._mtp.final_norm, self._head)

    def _embed(self, input_ids: Tensor) -> Tensor:
        """[T, hidden] float32"""
        if self.embedding is not None:
            return embedding(input_ids, self.embedding).float()
        x = torch.empty(len(input_ids), self._shape.hidden_size)
        head = ctypes.byref(self._head.struct)
        self._library.unpack(head, address(input_ids), len(input_ids), address(x))
        return x

    def _product(self, x: Tensor, norm: Tensor, matrix: PackedMatrix) -> Tensor:
        """x [N, k] float32, normed, with a matrix [n, k] → [N, n] float32."""
        normed = torch.empty(x.shape, dtype=self._library.dtype)
        out = torch.empty(len(x), matrix.struct.n)
        self._library.head(
            *(address(x), len(x), address(norm), ctypes.c_float(self._shape.eps)),
            *(ctypes.byref(matrix.struct), address(normed), address(out)),
        )
        return out


class _Mtp:
    """An MTP layer. The product with hidden state and embedding, one behind the other, is the sum
    of the products with either."""

    def __init__(self, library: NativeLibrary, shape: DecoderShape, layer: MtpLayer) -> None:
        hidden, token = torch.split(layer.input_proj.weight, shape.hidden_size, 1)
        self.hidden_norm = layer.hidden_layernorm.weight.float()
        self.token_norm = layer.token_layernorm.weight.float()
        self.final_norm = layer.final_layernorm.weight.float()
        self.hidden_proj, self.token_proj = library.pack(hidden), library.pack(token)
        weights = _pack_layer(library, layer, shape.intermediate_size)
        self.decoder = NativeDecoder(library, shape, [weights])
        norms = [self.hidden_norm, self.token_norm, self.final_norm]
        products = [*self.hidden_proj.tensors, *self.token_proj.tensors]
        self.tensors = norms + products + weights.tensors


def _pack_layer(
    library: NativeLibrary, layer: DecoderLayer, intermediate_size: int
) -> LayerWeights:
    attention, mlp = layer.self_attn, layer.mlp
    norms = attention.qk_norm if isinstance(attention.qk_norm, QKNorm) else None
    return LayerWeights(
        layer.input_layernorm.weight.float(),
        _pack(library, attention.qkv_proj),
        None if norms is None else norms.query_weight.float(),
        None if norms is None else norms.key_weight.float(),
        _pack(library, attention.o_proj),
        layer.post_attention_layernorm.weight.float(),
        library.pack(
            mlp.gate_up_proj.weight, mlp.gate_up_proj.bias, gate_up_order(intermediate_size)
        ),
        _pack(library, mlp.down_proj),
    )


def _pack(library: NativeLibrary, linear: Linear) -> PackedMatrix:
    return library.pack(linear.weight, linear.bias)
