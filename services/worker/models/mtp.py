"""Layers that predict further tokens (MTP, arXiv 2412.19437, 2.2).

Of several MTP layers only the first is used, repeatedly for drafts further ahead.
"""

from collections.abc import Callable

from torch import nn

from services.worker.layers.embedding import LMHead
from services.worker.layers.linear import Columns, Linear
from services.worker.layers.mlp import GatedMLP, Mixture
from services.worker.layers.ops import Ops, X
from services.worker.models.decoder import AnyAttention, DecoderLayer, DecoderLM, MtpHead, Trunk
from services.worker.models.parts import Parts


class MtpLayer(DecoderLayer):
    """A decoder layer on the GEMM of a concatenated hidden state and embedding: the sum of one
    GEMM for each. Without ``has_norm`` the trunk's last norm is the output's too."""

    def __init__(
        self,
        parts: Parts,
        hidden_size: int,
        attention: AnyAttention,
        mlp: GatedMLP | Mixture,
        *,
        has_norm: bool,
    ) -> None:
        super().__init__(parts, attention, mlp)
        self.token_layernorm = parts.norm()
        self.hidden_layernorm = parts.norm()
        both = 2 * hidden_size
        self.hidden_proj = Linear(hidden_size, hidden_size, columns=Columns("input_proj", 0, both))
        self.token_proj = Linear(
            hidden_size, hidden_size, columns=Columns("input_proj", hidden_size, both)
        )
        self.final_layernorm = parts.norm() if has_norm else None

    def forward_pair(self, ops: Ops[X], state: X, embedded: X) -> X:
        """[T, hidden] each → [T, hidden]"""
        x = ops.linear(state, self.hidden_proj, norm=self.hidden_layernorm)
        x = ops.linear(embedded, self.token_proj, norm=self.token_layernorm, residual=x)
        return self.forward(ops, x)


class NormedMtpHead(MtpHead):
    """Takes states after the trunk's last norm, and returns normed states, like DeepSeek-V3."""

    def __init__(self, trunk: Trunk, layer: MtpLayer, lm_head: LMHead) -> None:
        self._trunk, self._layer, self.lm_head = trunk, layer, lm_head
        self._norm = layer.final_layernorm or trunk.norm

    def first_state(self, ops: Ops[X], hidden: X) -> X:
        return ops.norm(hidden, self._trunk.norm)

    def forward(self, ops: Ops[X], state: X, ids: X) -> X:
        embedded = ops.embed(ids, self._trunk.embed_tokens)
        return ops.norm(self._layer.forward_pair(ops, state, embedded), self._norm)

    def logits(self, ops: Ops[X], out: X) -> X:
        return ops.logits(out, self.lm_head)


def add_mtp_head(
    model: DecoderLM,
    num: int,
    make_parts: Callable[[Parts, int], tuple[AnyAttention, GatedMLP | Mixture]],
    make_head: Callable[[Trunk, MtpLayer, LMHead], MtpHead] = NormedMtpHead,
    *,
    has_norm: bool = True,
) -> None:
    """Gives ``model`` its ``num`` MTP layers, which are numbered on and made of ``make_parts``, and
    the head of the first one if there is any."""
    config, parts = model.config, model.parts
    layers = [
        MtpLayer(parts, config.hidden_size, *make_parts(parts, number), has_norm=has_norm)
        for number in range(config.num_hidden_layers, config.num_hidden_layers + num)
    ]
    model.model.mtp_layers = nn.ModuleList(layers)
    if layers:
        assert model.lm_head is not None
        model.mtp_head = make_head(model.model, layers[0], model.lm_head)
    model.place_layers()
