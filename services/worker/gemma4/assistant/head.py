"""The layers of an assistant model as an MTP head: they attend to the keys and values of the
model's last layer of their kind."""

from dataclasses import replace

import torch
from torch import Tensor, nn

from kernels.grammar_mask import HIDDEN
from services.worker.gemma4.assistant.config import (
    AssistantConfig,
    Clusters,
    LayersConfig,
    source_of,
)
from services.worker.gemma4.assistant.drafter import AssistantDrafter
from services.worker.gemma4.attention import OwnAttention, SharedAttention
from services.worker.gemma4.config import FULL
from services.worker.gemma4.layers import Gemma4Layer
from services.worker.gemma4.model import Gemma4ForCausalLM
from services.worker.layers.embedding import Embedding, LMHead
from services.worker.layers.heads import Heads
from services.worker.layers.linear import Linear
from services.worker.layers.ops import Ops, X
from services.worker.layers.parallel import ALONE
from services.worker.layers.rope import RotaryEmbedding
from services.worker.layers.weights import Dense
from services.worker.models.decoder import MtpHead
from services.worker.models.parts import Parts

TABLE, CENTROIDS = "model.embed_tokens.weight", "masked_embedding.centroids.weight"


class AssistantAttention(SharedAttention):
    """With its own number of query heads, and perhaps rotations of its own."""

    def __init__(
        self, config: LayersConfig, layer: int, source: OwnAttention, rotary: RotaryEmbedding
    ) -> None:
        super().__init__(config, layer, source, ALONE)
        self._num_heads = config.num_attention_heads
        self._rotary = rotary

    @property
    def heads(self) -> Heads:
        found = super().heads
        spec = replace(found.spec, num_heads=self._num_heads)
        return found._replace(spec=spec, rotary=self._rotary)


class ClusterHead(LMHead):
    """An output head for the tokens of the likeliest clusters. ``weight`` has the centroids of
    clusters, and ``ids`` [vocab_size] int64 the tokens, cluster by cluster."""

    ids: Tensor

    def __init__(self, clusters: Clusters, ids: Tensor, table: Embedding) -> None:
        super().__init__(clusters.num, table.inputs, CENTROIDS)
        self.table = table
        self.register_buffer("ids", ids, persistent=False)
        self._num_chosen = clusters.num_chosen

    def spread(self, logits: Tensor, states: Tensor) -> Tensor:
        """logits [S, clusters] → [S, vocab_size]; −inf for tokens of other clusters. The sums of a
        row have the same order in any batch."""
        weight = self.table.weight
        assert isinstance(weight, Dense)
        chosen = logits.topk(self._num_chosen).indices
        ids = self.ids.view(logits.shape[1], -1)[chosen].flatten(1)
        rows = zip(ids.unbind(), states.float().unbind(), strict=True)
        found = torch.stack([weight.values[each].float() @ state for each, state in rows])
        return logits.new_full((len(logits), len(self.ids)), HIDDEN).scatter_(1, ids, found)


class AssistantTrunk(nn.Module):
    def __init__(self, config: LayersConfig, model: Gemma4ForCausalLM) -> None:
        super().__init__()
        self.layers = nn.ModuleList()
        rotaries: dict[str, RotaryEmbedding] = {}
        for layer, kind in enumerate(config.kinds):
            source: OwnAttention = model.model.layers[source_of(kind, model.config)].self_attn  # type: ignore[assignment]
            if kind not in rotaries:
                rotaries[kind] = _rotary(config, layer, source, model)
            attention = AssistantAttention(config, layer, source, rotaries[kind])
            parts = Parts(config, rotaries[kind], ALONE)
            self.layers.append(Gemma4Layer(config, parts, attention, layer))
        self.norm = parts.norm()


class AssistantModule(nn.Module):
    """The parameters, named as in checkpoints. ``ids`` are the tokens of clusters, if there are
    some."""

    def __init__(
        self,
        config: AssistantConfig,
        layers: LayersConfig,
        ids: Tensor | None,
        model: Gemma4ForCausalLM,
    ) -> None:
        super().__init__()
        size, outer = layers.hidden_size, config.backbone_hidden_size
        self.pre_projection = Linear(2 * outer, size)
        self.model = AssistantTrunk(layers, model)
        self.post_projection = Linear(size, outer)
        self.lm_head: LMHead
        if config.clusters is None or ids is None:
            self.lm_head = LMHead(layers.vocab_size, size, TABLE)
        else:
            self.table = Embedding(layers.vocab_size, size, TABLE)
            self.lm_head = ClusterHead(config.clusters, ids, self.table)


class AssistantHead(MtpHead):
    """``forward`` gives the state for the next draft, as wide as the model's, and the state for
    logits behind it."""

    make_drafter = AssistantDrafter

    def __init__(self, module: AssistantModule, model: Gemma4ForCausalLM) -> None:
        self._module = module
        self._embed_tokens, self._scale = model.model.embed_tokens, model.embedding_scale
        self._norm = model.model.norm
        self.lm_head = module.lm_head

    def first_state(self, ops: Ops[X], hidden: X) -> X:
        return ops.norm(hidden, self._norm)

    def forward(self, ops: Ops[X], state: X, ids: X) -> X:
        module = self._module
        embedded = ops.scale(ops.embed(ids, self._embed_tokens), self._scale)
        x = ops.linear(ops.join(embedded, state), module.pre_projection)
        for layer in module.model.layers:
            x = layer.forward(ops, x)
        normed = ops.norm(x, module.model.norm)
        return ops.join(ops.linear(normed, module.post_projection), normed)

    def logits(self, ops: Ops[X], out: X) -> X:
        return ops.logits(out, self.lm_head)


def _rotary(
    config: LayersConfig, layer: int, source: OwnAttention, model: Gemma4ForCausalLM
) -> RotaryEmbedding:
    """The model's if they are alike."""
    is_full = config.kinds[layer] == FULL
    own = config.rope if is_full else config.sliding_rope
    other = model.config.rope if is_full else model.config.sliding_rope
    if own == other:
        return source.heads.rotary
    length = model.config.max_position_embeddings
    return RotaryEmbedding(own, config.head_sizes(layer).head_dim, length)
