"""gpt-oss (arXiv 2508.10925): heads with sinks, windows in every second layer, and experts with
biases and with clamped gates and ups."""

from typing import Annotated, Any

import msgspec

from kernels.experts import Clamp
from kernels.route import Routing
from services.worker.config.model_config import Num, Window
from services.worker.config.sparse_config import SparseConfig
from services.worker.layers.experts import Router
from services.worker.layers.linear import WeightPiece
from services.worker.layers.mlp import Mixture
from services.worker.models.decoder import DecoderLayer, DecoderLM
from services.worker.models.parts import Parts
from services.worker.models.qwen import WindowsConfig

YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "original_max_position_embeddings": 4096,
    "truncate": False,
}


class GptOssRouter(Router):
    def checkpoint_pieces(self, name: str) -> dict[str, WeightPiece]:
        assert self.bias is not None
        return {"router.weight": WeightPiece(self.weight), "router.bias": WeightPiece(self.bias)}


class GptOssForCausalLM(DecoderLM):
    class Config(SparseConfig, WindowsConfig, frozen=True, kw_only=True):
        num_local_experts: Num = 128
        num_experts_per_tok: Num = 4
        swiglu_alpha: float = 1.702
        swiglu_limit: Annotated[float, msgspec.Meta(gt=0)] = 7.0
        attention_bias: bool = True
        use_sliding_window: bool = True
        sliding_window: Window = 128
        rope_theta: float | None = 150000.0
        rope_parameters: dict[str, Any] | None = msgspec.field(default_factory=lambda: {**YARN})

        @property
        def num_routed_experts(self) -> int:
            return self.num_local_experts

        @property
        def routing(self) -> Routing:
            return Routing(self.num_experts_per_tok, "softmax_of_chosen")

        def window(self, layer: int) -> int | None:
            if self.layer_types:
                return super().window(layer)
            return None if layer % 2 else self.sliding_window

    config: Config

    def make_layer(self, parts: Parts, layer: int) -> DecoderLayer:
        config, bias = self.config, self.config.attention_bias
        attention = parts.attention(
            layer,
            window=config.window(layer),
            has_sinks=True,
            has_qkv_bias=bias,
            has_out_bias=bias,
        )
        num, size = config.num_local_experts, config.intermediate_size
        mixture = Mixture(
            GptOssRouter(config.hidden_size, num, config.routing, has_bias=True),
            parts.experts(num, size, has_bias=True),
            act=Clamp(config.swiglu_alpha, config.swiglu_limit),
        )
        return DecoderLayer(parts, attention, mixture)
