"""ERNIE 4.5 (technical report of June 2025), dense and with experts: neighbours rotate as pairs."""

from abc import abstractmethod

from kernels.route import Routing
from services.worker.config.model_config import ModelConfig, Num
from services.worker.config.sparse_config import SparseConfig
from services.worker.layers.experts import Router
from services.worker.layers.linear import WeightPiece
from services.worker.layers.mlp import GatedMLP, Mixture
from services.worker.layers.parallel import ALONE, Parallel
from services.worker.models.decoder import DecoderLayer, DecoderLM
from services.worker.models.mtp import add_mtp_head
from services.worker.models.parts import Parts


class ErnieRouter(Router):
    """Its correction is stored outside of it, as a row."""

    def checkpoint_pieces(self, name: str) -> dict[str, WeightPiece]:
        assert self.e_score_correction_bias is not None
        return {
            f"{name}.weight": WeightPiece(self.weight),
            "moe_statics.e_score_correction_bias": WeightPiece(self.e_score_correction_bias[None]),
        }


class ErnieConfig(SparseConfig, frozen=True, kw_only=True):
    moe_k: Num
    moe_num_shared_experts: int | None = 2
    moe_layer_interval: Num = 1
    moe_norm_min: float = 1e-12
    rope_theta: float | None = 500000.0
    tie_word_embeddings: bool | None = True
    use_bias: bool = False
    num_nextn_predict_layers: int = 0

    @property
    def routing(self) -> Routing:
        return Routing(self.moe_k, min_sum=self.moe_norm_min)

    def problems(self) -> list[str]:
        problems = super().problems()
        if self.use_bias:
            problems.append("use_bias true is not supported beside experts; only false is")
        return problems


class ErnieMoe(DecoderLM):
    """A family makes the experts of a layer."""

    config: ErnieConfig
    is_interleaved = True

    def __init__(self, config: ErnieConfig, parallel: Parallel = ALONE) -> None:
        super().__init__(config, parallel)
        add_mtp_head(
            self,
            config.num_nextn_predict_layers,
            lambda parts, layer: (parts.attention(layer), parts.mlp()),
            has_norm=False,
        )

    def make_layer(self, parts: Parts, layer: int) -> DecoderLayer:
        mlp = self.make_experts(parts) if self.config.is_sparse(layer) else parts.mlp()
        return DecoderLayer(parts, parts.attention(layer), mlp)

    @abstractmethod
    def make_experts(self, parts: Parts) -> Mixture:
        """Of a layer."""

    def make_router(self, num: int) -> ErnieRouter:
        config = self.config
        return ErnieRouter(config.hidden_size, num, config.routing, has_correction=True)

    def make_shared(self, parts: Parts, size: int) -> GatedMLP | None:
        num = self.config.moe_num_shared_experts
        return parts.mlp(size=num * size) if num else None


class Ernie4_5_MoeForCausalLM(ErnieMoe):  # noqa: N801, its name in config.json
    class Config(ErnieConfig, frozen=True, kw_only=True):
        moe_num_experts: Num
        moe_intermediate_size: Num
        moe_layer_start_index: int = 1
        moe_layer_end_index: int = -1  # the last one that has experts; -1: of all

        @property
        def num_routed_experts(self) -> int:
            return self.moe_num_experts

        def is_sparse(self, layer: int) -> bool:
            end = self.moe_layer_end_index
            last = self.num_hidden_layers - 1 if end == -1 else end
            is_within = self.moe_layer_start_index <= layer <= last
            return is_within and (layer + 1) % self.moe_layer_interval == 0

    config: Config

    def make_experts(self, parts: Parts) -> Mixture:
        num, size = self.config.moe_num_experts, self.config.moe_intermediate_size
        shared = self.make_shared(parts, size)
        return Mixture(self.make_router(num), parts.experts(num, size), shared)


class Ernie4_5ForCausalLM(DecoderLM):  # noqa: N801, its name in config.json
    class Config(ModelConfig, frozen=True):
        rope_theta: float | None = 500000.0
        tie_word_embeddings: bool | None = True
        use_bias: bool = False

    config: Config
    is_interleaved = True

    def make_layer(self, parts: Parts, layer: int) -> DecoderLayer:
        bias = self.config.use_bias
        attention = parts.attention(layer, has_qkv_bias=bias, has_out_bias=bias)
        return DecoderLayer(parts, attention, parts.mlp(bias))


Ernie4_5_ForCausalLM = Ernie4_5ForCausalLM  # in folders of Paddle
