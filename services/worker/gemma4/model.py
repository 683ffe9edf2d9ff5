"""Gemma 4's texts: the dense models (12B, 31B), the one with experts (26B-A4B), and the ones with
embeddings for each layer and shared keys and values (E2B, E4B)."""

from typing import NamedTuple, cast

import torch

from services.worker.gemma4.attention import OwnAttention, SharedAttention
from services.worker.gemma4.config import FULL, Gemma4Config, UnifiedConfig
from services.worker.gemma4.layers import Gemma4Layer, SparseLayer
from services.worker.gemma4.operators import norm_parts
from services.worker.layers.embedding import Embedding
from services.worker.layers.linear import Linear
from services.worker.layers.norm import RMSNorm
from services.worker.layers.ops import Ops, X
from services.worker.layers.parallel import ALONE, Parallel
from services.worker.layers.rope import RotaryEmbedding
from services.worker.models.decoder import DecoderLM
from services.worker.models.parts import Parts
from shared.errors import ConfigError


class LayerInputs(NamedTuple):
    """The source of the numbers that a token brings for each layer."""

    table: Embedding
    projection: Linear
    norm: RMSNorm
    scale: float


class Gemma4ForCausalLM(DecoderLM):
    Config = Gemma4Config
    config: Gemma4Config

    def __init__(self, config: Gemma4Config, parallel: Parallel = ALONE) -> None:
        super().__init__(config, parallel)
        self.embedding_scale = self._rounded(config.hidden_size**0.5)
        self.logits_softcap = config.final_logit_softcapping
        self._inputs = self._add_inputs() if config.num_inputs else None
        self.more_sizes = () if self._inputs is None else (self._inputs.table.inputs,)

    def make_layer(self, parts: Parts, layer: int) -> Gemma4Layer:
        config, source = self.config, self.config.source_of(layer)
        attention: OwnAttention | SharedAttention
        if source == layer:
            attention = OwnAttention(config, layer, self._rotary(layer), self.parallel)
        else:
            own = cast(Gemma4Layer, self.model.layers[source]).self_attn
            attention = SharedAttention(config, layer, cast(OwnAttention, own), self.parallel)
        kind = SparseLayer if config.is_sparse(layer) else Gemma4Layer
        return kind(config, parts, attention, layer)

    def forward(self, ops: Ops[X], given: X) -> X:
        if self._inputs is None:
            return super().forward(ops, given)
        x = super().embed(ops, given)
        return self.from_embeddings(ops, x, self._of_ids(ops, given, self._inputs))

    def embed(self, ops: Ops[X], ids: X) -> X:
        """With the numbers of ids for all layers, if there are some."""
        x, inputs = super().embed(ops, ids), self._inputs
        return x if inputs is None else ops.join(x, self._of_ids(ops, ids, inputs))

    def from_embeddings(self, ops: Ops[X], x: X, *more: X) -> X:
        if self._inputs is None:
            return super().from_embeddings(ops, x, *more)
        inputs = self._join(ops, x, more[0], self._inputs)
        for layer in self.model.layers:
            ops.enter(layer)
            x = layer.forward(ops, x, inputs)
        return x

    def _add_inputs(self) -> LayerInputs:
        """In the trunk, by their names in checkpoints."""
        config, trunk = self.config, self.model
        num = config.num_hidden_layers * config.num_inputs
        vocab = self.parallel.vocabulary(config.vocab_size_per_layer_input)
        made = LayerInputs(
            table=Embedding(vocab, num, "embed_tokens_per_layer.weight"),
            projection=Linear(config.hidden_size, num),
            norm=RMSNorm(config.num_inputs, config.rms_norm_eps),
            scale=self._rounded(config.num_inputs**0.5),
        )
        trunk.embed_tokens_per_layer = made.table
        trunk.per_layer_model_projection = made.projection
        trunk.per_layer_projection_norm = made.norm
        return made

    def _of_ids(self, ops: Ops[X], ids: X, inputs: LayerInputs) -> X:
        """[T] → [T, layers · num_inputs]"""
        return ops.scale(ops.embed(ids, inputs.table), inputs.scale)

    def _join(self, ops: Ops[X], x: X, of_ids: X, inputs: LayerInputs) -> X:
        """The numbers of tokens' ids, and of their embeddings x [T, hidden] → [T, layers ·
        num_inputs]"""
        of_states = ops.scale(ops.linear(x, inputs.projection), self.config.hidden_size**-0.5)
        return ops.scale(norm_parts(ops, of_states, inputs.norm, of_ids), 2**-0.5)

    def _rotary(self, layer: int) -> RotaryEmbedding:
        config, trunk = self.config, self.model
        if config.kinds[layer] == FULL:
            return trunk.rotary
        if trunk.local_rotary is None:
            head_dim, _ = config.head_sizes(layer)
            length = config.max_position_embeddings
            trunk.local_rotary = RotaryEmbedding(config.sliding_rope, head_dim, length)
        return trunk.local_rotary

    def _check_stages(self) -> None:
        num, config = self.parallel.stage.num, self.config
        if num > 1 and (config.num_inputs or config.num_kv_shared_layers):
            raise ConfigError(
                f"pipeline-parallel-size: {num} is not supported for a Gemma 4 with"
                " hidden_size_per_layer_input or num_kv_shared_layers; only 1 is"
            )
        super()._check_stages()

    def _rounded(self, scale: float) -> float:
        """As transformers rounds it, to the embeddings' type."""
        dtype = self.model.embed_tokens.weight.values.dtype
        return torch.tensor(scale, dtype=dtype, device="cpu").item()


class Gemma4ForConditionalGeneration(Gemma4ForCausalLM):
    """The text part."""


class Gemma4UnifiedForCausalLM(Gemma4ForCausalLM):
    Config = UnifiedConfig


class Gemma4UnifiedForConditionalGeneration(Gemma4UnifiedForCausalLM):
    """The text part."""
