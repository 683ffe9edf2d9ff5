"""The decoder of most families: layers that share one rotary embedding, and an output head.

A family defines the parts of its layers. Modules are named as in its checkpoints.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import reduce
from typing import ClassVar

import torch
from torch import nn

from kernels.kv_layout import KVLayout
from services.worker.config.frequencies import Rope
from services.worker.config.model_config import ModelConfig
from services.worker.layers.attention import Attention
from services.worker.layers.embedding import DraftLMHead, Embedding, LMHead
from services.worker.layers.kept import Cached, Stateful
from services.worker.layers.latent import LatentAttention
from services.worker.layers.mlp import GatedMLP, Mixture
from services.worker.layers.offloaded import Offloaded
from services.worker.layers.ops import Ops, X
from services.worker.layers.parallel import ALONE, Parallel, Shard
from services.worker.layers.rope import RotaryEmbedding
from services.worker.machine.kv_groups import KVSpec, LayerGroups
from services.worker.machine.state_pool import StateSpec
from services.worker.models import MakeDrafter
from services.worker.models.parts import Parts, make_norm
from shared.errors import ConfigError
from shared.wire.messages import EVERY_LAYER, Group

AnyAttention = Attention | LatentAttention


class DecoderLayer(nn.Module):
    """Norms the inputs of attention and MLP, and multiplies their outputs by ``scale``."""

    def __init__(
        self,
        parts: Parts,
        attention: AnyAttention,
        mlp: GatedMLP | Mixture,
        scale: float = 1.0,
    ) -> None:
        super().__init__()
        self.input_layernorm = parts.norm()
        self.self_attn = attention
        self.post_attention_layernorm = parts.norm()
        self.mlp = mlp
        self.scale = scale

    def forward(self, ops: Ops[X], x: X) -> X:
        """[T, hidden] → [T, hidden]"""
        scale = self.scale
        x = self.self_attn.forward(ops, x, norm=self.input_layernorm, residual=x, scale=scale)
        return self.mlp.forward(ops, x, norm=self.post_attention_layernorm, residual=x, scale=scale)


class RemoteLayer(nn.Module):
    """The placeholder of a layer on another stage."""

    def forward(self, _: Ops[X], x: X) -> X:
        return x


class Trunk(nn.Module):
    """Gives hidden states [T, hidden], before the last norm, and after them, for drafts, the inputs
    of ``tapped`` layers: [T, hidden] each. ``local_rotary`` serves layers with a window, if they
    have their own."""

    tapped: Collection[int] = ()

    def __init__(self, config: ModelConfig, vocab: Shard, is_interleaved: bool) -> None:
        super().__init__()
        self.embed_tokens = Embedding(vocab, config.hidden_size, "embed_tokens.weight")
        self.layers = nn.ModuleList()
        self.norm = make_norm(config)
        self.mtp_layers = nn.ModuleList()
        self.rotary = _rotary(config, config.rope, is_interleaved)
        local = config.local_rope
        self.local_rotary = None if local is None else _rotary(config, local, is_interleaved)

    def forward(self, ops: Ops[X], x: X) -> X:
        """[T, hidden], the embeddings or the states of the stage before → hidden states"""
        inputs = []
        for number, layer in enumerate(self.layers):
            ops.enter(layer)
            if number in self.tapped:
                inputs.append(ops.copy(x))
            x = layer.forward(ops, x)
        return reduce(ops.join, inputs, x)


def _rotary(config: ModelConfig, rope: Rope, is_interleaved: bool) -> RotaryEmbedding:
    length = config.max_position_embeddings
    return RotaryEmbedding(rope, config.rotary_dim, length, is_interleaved)


class MtpHead(ABC):
    """A head that predicts further tokens (MTP): a layer on a state and the next token.

    The layer's KV cache comes after the trunk's. ``lm_head`` is the model's, or has some of its
    rows. A head with another kind of drafter can ``make_drafter``.
    """

    lm_head: LMHead
    make_drafter: MakeDrafter | None = None

    def first_state(self, ops: Ops[X], hidden: X) -> X:
        """The trunk's hidden states [T, hidden], or the inputs of its tapped layers, as the head
        takes them: by default as they are, before the last norm."""
        return hidden

    @abstractmethod
    def forward(self, ops: Ops[X], state: X, ids: X) -> X:
        """state [T, hidden] of a token, or the head's output for it; ids [T], the next tokens →
        [T, hidden], the state for the next draft."""

    @abstractmethod
    def logits(self, ops: Ops[X], out: X) -> X:
        """[N, hidden], some rows of ``forward``'s output → [N, tokens of ``lm_head``] float32"""


class DecoderLM(nn.Module, ABC):
    """The trunk, its output head and, if there is one, its MTP head, or a rank's shards of them.
    A backend computes it. A model that pools has neither head.

    ``Config`` is the type of config.json. ``offloaded`` copies the weights of offloaded layers to
    the device. A stage ``has_head_elsewhere`` if the last stage has an MTP head. Set
    ``num_embeddings`` before a backend is chosen, for passes from as many inputs besides those from
    ids: embeddings, and others that layers add.
    """

    Config: ClassVar[type[ModelConfig]] = ModelConfig
    embedding_scale = 1.0
    logits_scale = 1.0
    logits_softcap: float | None = None
    mtp_head: MtpHead | None = None
    draft_lm_head: DraftLMHead | None = None
    offloaded: Offloaded | None = None
    has_head_elsewhere = False
    num_embeddings = 0
    more_sizes: tuple[int, ...] = ()  # of parts of ``embed``'s rows behind the embedding
    groups: tuple[Group, ...] = EVERY_LAYER
    _specs_of_all: Mapping[int, KVSpec] = {}  # on a stage

    def __init__(self, config: ModelConfig, parallel: Parallel = ALONE) -> None:
        super().__init__()
        self.config = config
        self.parallel = parallel
        vocab = parallel.vocabulary(config.vocab_size)
        self.model = Trunk(config, vocab, self.is_interleaved)
        self.parts = Parts(config, self.model.rotary, parallel)
        self.model.layers.extend(
            self.make_layer(self.parts, layer) for layer in range(config.num_hidden_layers)
        )
        source = "model.embed_tokens" if self.is_tied else "lm_head"
        tied = self.model.embed_tokens if self.is_tied else None
        self.lm_head: LMHead | None = LMHead(vocab, config.hidden_size, f"{source}.weight", tied)
        self.place_layers()

    def drop_heads(self) -> None:
        """Makes it a model that pools: ``logits`` gives the states after the last norm."""
        self.lm_head = self.mtp_head = None

    def limit_drafts(self, head: DraftLMHead) -> None:
        """Has the MTP head, which there is, draft the tokens of ``head`` alone."""
        assert self.mtp_head is not None
        self.draft_lm_head = self.mtp_head.lm_head = head

    def remote_modules(self) -> Iterator[nn.Module]:
        """The parts on other stages. Raises ConfigError if a stage would have no layer, none with a
        KV cache, or none with a state in a model with states."""
        stage, layers = self.parallel.stage, self.model.layers
        self._check_stages()
        own = stage.layers(len(layers))
        yield from (layer for number, layer in enumerate(layers) if number not in own)
        embeds = stage.is_first or (stage.is_last and self.mtp_head is not None)
        if not embeds:
            yield self.model.embed_tokens
        if not stage.is_last:
            yield self.model.mtp_layers
            if self.lm_head is not None:
                yield self.lm_head

    def drop_remote(self) -> None:
        """Makes it the part of a model that its stage has, with places of the KV cache and of
        states for its own layers alone."""
        stage, trunk = self.parallel.stage, self.model
        if stage.num == 1:
            return
        self._specs_of_all = self._kv_specs()
        left, own = list(self.remote_modules()), stage.layers(len(trunk.layers))
        for number in range(len(trunk.layers)):
            if number not in own:
                trunk.layers[number] = RemoteLayer()
        if trunk.embed_tokens in left:
            trunk.embed_tokens.leave()
        if not stage.is_last:
            self.has_head_elsewhere = self.mtp_head is not None
            self.drop_heads()
            trunk.mtp_layers = nn.ModuleList()
        self.place_layers()

    def _check_stages(self) -> None:
        """Each stage has a part of the KV cache and, in a model with states, of these."""
        stage = self.parallel.stage
        needed = {"attention": set(self._kv_specs())}
        if states := {each.number for each in self.state_layers()}:
            needed["a state"] = states
        for number in range(stage.num):
            own = replace(stage, number=number).layers(len(self.model.layers))
            for what, layers in needed.items():
                if layers.isdisjoint(own):
                    raise ConfigError(
                        f"pipeline-parallel-size: of {stage.num} stages, number {number} would have"
                        f" the layers {own[0]} to {own[-1]}, none with {what}; each needs one"
                    )

    @property
    def state_size(self) -> int:
        """The numbers that ``forward`` gives of a token."""
        return self.config.hidden_size * (1 + len(self.model.tapped))

    @property
    def drafting_size(self) -> int:
        """The last of these, which an MTP head takes."""
        return self.config.hidden_size * (len(self.model.tapped) or 1)

    @property
    def is_interleaved(self) -> bool:
        """Neighbours, and not a head's halves, are the pairs of its rotation."""
        return False

    @property
    def is_tied(self) -> bool:
        """The output head has the embedding's weights."""
        return bool(self.config.tie_word_embeddings)

    def kv_layouts(
        self, dtype: torch.dtype, *, drafts: bool, codes: torch.dtype | None = None
    ) -> list[KVLayout]:
        """The cached values of a token in each layer of the trunk, and of the MTP head if it
        ``drafts``: numbers, or ``codes`` of that type. Raises ConfigError for layers without
        codes."""
        return [
            each.kv_layout(dtype, codes)
            for each in self._cached_layers(drafts)
            for _ in range(each.kv_spec.num_entries)
        ]

    def kv_specs(self, *, drafts: bool) -> Sequence[KVSpec]:
        """The layers of the whole model, on all stages, in order."""
        specs = self._specs_of_all or self._kv_specs()
        return [specs[number] for number in specs if number < self._num_layers(drafts)]

    def put_groups(self, found: LayerGroups) -> None:
        """``found`` for the layers of ``kv_specs``."""
        self.groups = found.groups
        numbers = self._specs_of_all or self._kv_specs()
        self._put_caches(dict(zip(numbers, found.of_layers, strict=False)))

    def layer_groups(self, *, drafts: bool) -> list[int]:
        """The group of each of ``kv_layouts``."""
        layers = self._cached_layers(drafts)
        return [each.group for each in layers for _ in range(each.kv_spec.num_entries)]

    def state_specs(self) -> list[StateSpec]:
        """The layers of this stage with a state, in order."""
        return [each.state_spec for each in self.state_layers()]

    def _kv_specs(self) -> dict[int, KVSpec]:
        """By the layers' numbers, in order."""
        return {each.number: each.kv_spec for each in self.cached_layers()}

    def _num_layers(self, drafts: bool) -> int:
        return self.config.num_hidden_layers + drafts

    def _cached_layers(self, drafts: bool) -> list[Cached]:
        """The layers of this stage with a place in the KV cache, in order."""
        num_layers = self._num_layers(drafts)
        return [each for each in self.cached_layers() if each.number < num_layers]

    def place_layers(self) -> None:
        """Gives the layers their places in the KV cache, and among those with a state."""
        self._put_caches()
        for place, layer in enumerate(self.state_layers()):
            layer.put_state(place)

    def _put_caches(self, groups: Mapping[int, int] = {}) -> None:
        """Gives the layers their places in the KV cache, one after the other."""
        place = 0
        for layer in self.cached_layers():
            layer.put_cache(place, groups.get(layer.number, 0))
            place += layer.kv_spec.num_entries

    def cached_layers(self) -> list[Cached]:
        """The parts of all layers here that keep something of a token, the MTP head's too, in
        order."""
        found = [module for module in self.modules() if isinstance(module, Cached)]
        return sorted(found, key=lambda each: each.number)

    def state_layers(self) -> list[Stateful]:
        """The parts of all layers here with a state, in order."""
        found = [module for module in self.modules() if isinstance(module, Stateful)]
        return sorted(found, key=lambda each: each.number)

    def drop_windows(self, max_len: int) -> None:
        """Removes windows of at least ``max_len`` tokens, the longest sequence, because they hide
        nothing."""
        for module in self.cached_layers():
            if isinstance(module, Attention):
                module.drop_window(max_len)

    @abstractmethod
    def make_layer(self, parts: Parts, layer: int) -> nn.Module:
        """A layer whose ``forward(ops, x)`` is [T, hidden] → [T, hidden]."""

    def forward(self, ops: Ops[X], given: X) -> X:
        """ids [T], or the states [T, hidden] of the stage before → hidden states [T, hidden], for
        the next stage or the last norm."""
        x = self.embed(ops, given) if self.parallel.stage.is_first else given
        return self.model.forward(ops, x)

    def from_embeddings(self, ops: Ops[X], x: X, *more: X) -> X:
        """``forward`` from the parts of ``embed``'s rows, or from the states of a stage."""
        return self.model.forward(ops, x)

    def embed(self, ops: Ops[X], ids: X) -> X:
        """ids [T] → [T, hidden], the input of the first layer"""
        x = ops.embed(ids, self.model.embed_tokens)
        return x if self.embedding_scale == 1.0 else ops.scale(x, self.embedding_scale)

    def logits(self, ops: Ops[X], hidden: X) -> X:
        """[S, hidden], the states of some of the tokens → [S, vocab_size] float32, or without a
        head [S, hidden]."""
        if self.lm_head is None:
            return ops.norm(hidden, self.model.norm)
        norm, scale, softcap = self.model.norm, self.logits_scale, self.logits_softcap
        return ops.logits(hidden, self.lm_head, norm=norm, scale=scale, softcap=softcap)
