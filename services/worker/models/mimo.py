"""MiMo (arXiv 2505.07608): a Qwen2 trunk with layers that predict further tokens (MTP).

Of several such layers the first is used, again and again for drafts that are further ahead.
"""

from typing import cast

import torch
from torch import Tensor, nn

from services.worker.config.model_config import ModelConfig
from services.worker.layers.attention import Attention
from services.worker.layers.linear import Linear
from services.worker.layers.mlp import GatedMLP
from services.worker.layers.norm import RMSNorm
from services.worker.layers.rope import Rotation
from services.worker.models.decoder import DecoderLayer
from services.worker.models.qwen2 import Qwen2ForCausalLM


class MtpLayer(DecoderLayer):
    """A decoder layer on ``input_proj`` of a hidden state beside an embedding."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        mlp = GatedMLP(config.hidden_size, config.intermediate_size)
        super().__init__(config, Attention(config, layer, has_qkv_bias=True), mlp)
        self.token_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hidden_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.input_proj = Linear(2 * config.hidden_size, config.hidden_size)
        self.final_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def join(self, hidden: Tensor, embedded: Tensor, rotation: Rotation) -> Tensor:
        """Both [T, hidden] → [T, hidden], before ``final_layernorm``."""
        both = torch.cat((self.hidden_layernorm(hidden), self.token_layernorm(embedded)), -1)
        out: Tensor = self(self.input_proj(both), rotation)
        return out


class MiMoForCausalLM(Qwen2ForCausalLM):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        first = config.num_hidden_layers
        self.model.mtp_layers = nn.ModuleList(
            MtpLayer(config, first + i) for i in range(config.num_nextn_predict_layers)
        )
        self.has_mtp = config.num_nextn_predict_layers > 0

    def mtp(self, hidden: Tensor, input_ids: Tensor, positions: Tensor) -> Tensor:
        trunk = self.model
        embedded, rotation = trunk.embed_tokens(input_ids), trunk.rotary(positions)
        return self.mtp_layer.join(hidden, embedded, rotation)

    def mtp_logits(self, out: Tensor) -> Tensor:
        logits: Tensor = self.lm_head(self.mtp_layer.final_layernorm(out))
        return logits

    @property
    def mtp_layer(self) -> MtpLayer:
        return cast(MtpLayer, self.model.get_submodule("mtp_layers.0"))
