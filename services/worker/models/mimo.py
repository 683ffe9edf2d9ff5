"""MiMo (arXiv 2505.07608): a Qwen2 trunk with layers that predict further tokens (MTP)."""

from torch import nn

from services.worker.layers.embedding import LMHead
from services.worker.layers.ops import Ops, X
from services.worker.layers.parallel import ALONE, Parallel
from services.worker.models.decoder import MtpHead, Trunk
from services.worker.models.mtp import NormedMtpLayer
from services.worker.models.qwen import Qwen2ForCausalLM, WindowsConfig


class MiMoMtpHead(MtpHead):
    """Takes and gives states before the last norms."""

    def __init__(self, trunk: Trunk, layer: NormedMtpLayer, lm_head: LMHead) -> None:
        self._trunk = trunk
        self._layer = layer
        self.lm_head = lm_head

    def forward(self, ops: Ops[X], state: X, ids: X) -> X:
        return self._layer.forward_pair(ops, state, ops.embed(ids, self._trunk.embed_tokens))

    def logits(self, ops: Ops[X], out: X) -> X:
        return ops.logits(out, self.lm_head, norm=self._layer.final_layernorm)


class MiMoForCausalLM(Qwen2ForCausalLM):
    class Config(WindowsConfig, frozen=True):
        num_nextn_predict_layers: int = 0

    config: Config

    def __init__(self, config: Config, parallel: Parallel = ALONE) -> None:
        super().__init__(config, parallel)
        layers = [self._make_mtp_layer(i) for i in range(config.num_nextn_predict_layers)]
        self.model.mtp_layers = nn.ModuleList(layers)
        if layers:
            assert self.lm_head is not None
            self.mtp_head = MiMoMtpHead(self.model, layers[0], self.lm_head)

    def _make_mtp_layer(self, index: int) -> NormedMtpLayer:
        config, parts = self.config, self.parts
        attention = parts.attention(config.num_hidden_layers + index, has_qkv_bias=True)
        return NormedMtpLayer(parts, config.hidden_size, attention, parts.mlp())
