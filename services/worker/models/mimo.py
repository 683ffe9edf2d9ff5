"""MiMo (arXiv 2505.07608): a Qwen2 trunk with layers that predict further tokens (MTP)."""

from services.worker.layers.embedding import LMHead
from services.worker.layers.ops import Ops, X
from services.worker.layers.parallel import ALONE, Parallel
from services.worker.models.decoder import MtpHead, Trunk
from services.worker.models.mtp import MtpLayer, add_mtp_head
from services.worker.models.qwen import Qwen2ForCausalLM, WindowsConfig


class MiMoMtpHead(MtpHead):
    """Takes and gives states before the last norms."""

    def __init__(self, trunk: Trunk, layer: MtpLayer, lm_head: LMHead) -> None:
        self._trunk, self._layer, self.lm_head = trunk, layer, lm_head

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
        add_mtp_head(
            self,
            config.num_nextn_predict_layers,
            lambda parts, layer: (parts.attention(layer, has_qkv_bias=True), parts.mlp()),
            MiMoMtpHead,
        )
