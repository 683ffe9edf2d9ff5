"""MiMo (arXiv 2505.07608): a Qwen2 trunk with layers that predict further tokens (MTP).

The MTP layers are loaded with the rest; drafting with them is not written yet.
"""

from torch import nn

from services.worker.layers.attention import Attention
from services.worker.layers.linear import Linear
from services.worker.layers.mlp import GatedMLP
from services.worker.layers.norm import RMSNorm
from services.worker.model_config import ModelConfig
from services.worker.models.decoder import DecoderLayer
from services.worker.models.qwen2 import Qwen2ForCausalLM


class MtpLayer(DecoderLayer):
    """The weights of a decoder layer on ``input_proj`` of a hidden state beside an embedding."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        mlp = GatedMLP(config.hidden_size, config.intermediate_size)
        super().__init__(config, Attention(config, layer, has_qkv_bias=True), mlp)
        self.token_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hidden_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.input_proj = Linear(2 * config.hidden_size, config.hidden_size)
        self.final_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class MiMoForCausalLM(Qwen2ForCausalLM):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        first = config.num_hidden_layers
        self.model.mtp_layers = nn.ModuleList(
            MtpLayer(config, first + i) for i in range(config.num_nextn_predict_layers)
        )
