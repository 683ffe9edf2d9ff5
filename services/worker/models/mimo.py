"""MiMo (arXiv 2505.07608): a Qwen2 trunk with layers that predict further tokens (MTP).

Of several such layers the first is used, again and again for drafts that are further ahead.
"""

from torch import nn

from services.worker.layers.embedding import LMHead
from services.worker.layers.linear import Columns, Linear
from services.worker.layers.ops import Ops, X
from services.worker.layers.parallel import ALONE, Parallel
from services.worker.models.decoder import DecoderLayer, MtpHead, Parts, Trunk
from services.worker.models.qwen2 import Qwen2ForCausalLM, WindowsConfig


class MtpLayer(DecoderLayer):
    """A decoder layer on the product with a hidden state and an embedding, one behind the other:
    the sum of the products with either."""

    def __init__(self, parts: Parts, hidden_size: int, layer: int) -> None:
        super().__init__(parts, parts.attention(layer, has_qkv_bias=True), parts.mlp())
        self.token_layernorm = parts.norm()
        self.hidden_layernorm = parts.norm()
        both = 2 * hidden_size
        self.hidden_proj = Linear(hidden_size, hidden_size, columns=Columns("input_proj", 0, both))
        self.token_proj = Linear(
            hidden_size, hidden_size, columns=Columns("input_proj", hidden_size, both)
        )
        self.final_layernorm = parts.norm()


class MiMoMtpHead(MtpHead):
    def __init__(self, trunk: Trunk, layer: MtpLayer, lm_head: LMHead) -> None:
        self._trunk = trunk
        self._layer = layer
        self._lm_head = lm_head

    def forward(self, ops: Ops[X], state: X, ids: X) -> X:
        layer = self._layer
        embedded = ops.embed(ids, self._trunk.embed_tokens)
        x = ops.linear(state, layer.hidden_proj, norm=layer.hidden_layernorm)
        x = ops.linear(embedded, layer.token_proj, norm=layer.token_layernorm, residual=x)
        return layer.forward(ops, x)

    def logits(self, ops: Ops[X], out: X) -> X:
        return ops.logits(out, self._lm_head, norm=self._layer.final_layernorm)


class MiMoForCausalLM(Qwen2ForCausalLM):
    class Config(WindowsConfig, frozen=True):
        num_nextn_predict_layers: int = 0

    config: Config

    def __init__(self, config: Config, parallel: Parallel = ALONE) -> None:
        super().__init__(config, parallel)
        first = config.num_hidden_layers
        layers = [
            MtpLayer(self.parts, config.hidden_size, first + i)
            for i in range(config.num_nextn_predict_layers)
        ]
        self.model.mtp_layers = nn.ModuleList(layers)
        if layers:
            assert self.lm_head is not None
            self.mtp_head = MiMoMtpHead(self.model, layers[0], self.lm_head)
