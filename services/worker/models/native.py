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
from services.worker.context import current_context
from services.worker.layers.attention import QKNorm
from services.worker.layers.linear import Linear
from services.worker.model_config import ModelConfig
from services.worker.models import CausalLM
from services.worker.models.decoder import DecoderLayer, DecoderLM


def decoder_shape(model: DecoderLM, config: ModelConfig, block_size: int) -> DecoderShape:
    rotary = model.model.rotary
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
        self._decoder = NativeDecoder(library, shape, layers)
        self._keep([self._norm, shape.cos, shape.sin, *self._head.tensors])
        for packed in layers:
            self._keep(packed.tensors)

    def _keep(self, tensors: list[Tensor]) -> None:
        """As buffers, so that they are counted as the model's."""
        for tensor in tensors:
            self.register_buffer(f"packed_{len(self._buffers)}", tensor, persistent=False)

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        """Hidden states are float32."""
        if self.embedding is None:
            x = torch.empty(len(input_ids), self._shape.hidden_size)
            head = ctypes.byref(self._head.struct)
            self._library.unpack(head, address(input_ids), len(input_ids), address(x))
        else:
            x = embedding(input_ids, self.embedding).float()
        context = current_context()
        self._decoder.run(x, positions, context.slot_mapping, context.attention, context.kv_caches)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        normed = torch.empty(hidden.shape, dtype=self._library.dtype)
        logits = torch.empty(len(hidden), self._head.struct.n)
        self._library.head(
            *(address(hidden), len(hidden), address(self._norm), ctypes.c_float(self._shape.eps)),
            *(ctypes.byref(self._head.struct), address(normed), address(logits)),
        )
        return logits


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
