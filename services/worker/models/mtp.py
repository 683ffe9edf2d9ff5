"""Layers that predict further tokens (MTP, arXiv 2412.19437, 2.2).

Of several MTP layers only the first is used, repeatedly for drafts further ahead.
"""

from torch import nn

from services.worker.layers.embedding import LMHead
from services.worker.layers.linear import Columns, Linear
from services.worker.layers.mlp import GatedMLP, Mixture
from services.worker.layers.norm import RMSNorm
from services.worker.layers.ops import Ops, X
from services.worker.models.decoder import AnyAttention, DecoderLayer, DecoderLM, MtpHead, Trunk
from services.worker.models.parts import Parts


class MtpLayer(DecoderLayer):
    """A decoder layer on the GEMM of a concatenated hidden state and embedding: the sum of one
    GEMM for each."""

    def __init__(
        self, parts: Parts, hidden_size: int, attention: AnyAttention, mlp: GatedMLP | Mixture
    ) -> None:
        super().__init__(parts, attention, mlp)
        self.token_layernorm = parts.norm()
        self.hidden_layernorm = parts.norm()
        both = 2 * hidden_size
        self.hidden_proj = Linear(hidden_size, hidden_size, columns=Columns("input_proj", 0, both))
        self.token_proj = Linear(
            hidden_size, hidden_size, columns=Columns("input_proj", hidden_size, both)
        )

    def forward_pair(self, ops: Ops[X], state: X, embedded: X) -> X:
        """[T, hidden] each → [T, hidden]"""
        x = ops.linear(state, self.hidden_proj, norm=self.hidden_layernorm)
        x = ops.linear(embedded, self.token_proj, norm=self.token_layernorm, residual=x)
        return self.forward(ops, x)


class NormedMtpLayer(MtpLayer):
    """An MTP layer with a norm for its output."""

    def __init__(
        self, parts: Parts, hidden_size: int, attention: AnyAttention, mlp: GatedMLP | Mixture
    ) -> None:
        super().__init__(parts, hidden_size, attention, mlp)
        self.final_layernorm = parts.norm()


class NormedMtpHead(MtpHead):
    """Takes states after the trunk's last norm, and returns states after ``norm``, like
    DeepSeek-V3."""

    def __init__(self, trunk: Trunk, layer: MtpLayer, norm: RMSNorm, lm_head: LMHead) -> None:
        self._trunk = trunk
        self._layer = layer
        self._norm = norm
        self.lm_head = lm_head

    def first_state(self, ops: Ops[X], hidden: X) -> X:
        return ops.norm(hidden, self._trunk.norm)

    def forward(self, ops: Ops[X], state: X, ids: X) -> X:
        embedded = ops.embed(ids, self._trunk.embed_tokens)
        return ops.norm(self._layer.forward_pair(ops, state, embedded), self._norm)

    def logits(self, ops: Ops[X], out: X) -> X:
        return ops.logits(out, self.lm_head)


def add_mtp_head(model: DecoderLM, layers: list[NormedMtpLayer]) -> None:
    """Gives ``model`` its MTP ``layers``, and the head of the first one if there is any."""
    model.model.mtp_layers = nn.ModuleList(layers)
    if layers:
        assert model.lm_head is not None
        norm = layers[0].final_layernorm
        model.mtp_head = NormedMtpHead(model.model, layers[0], norm, model.lm_head)
    model.place_layers()
