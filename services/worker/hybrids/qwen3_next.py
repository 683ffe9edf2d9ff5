"""Qwen3-Next, Qwen3.5 and 3.6: gated delta layers and gated attention, without or with experts; and
the texts of models that read images too."""

from kernels.route import Routing
from services.worker.config.model_config import Num
from services.worker.hybrids.delta_hybrid import (
    HybridConfig,
    HybridLM,
    SparseHybridConfig,
    SparseHybridLM,
)


class Qwen3NextForCausalLM(SparseHybridLM):
    has_joined_inputs = True

    class Config(SparseHybridConfig, frozen=True, kw_only=True):
        norm_topk_prob: bool = True
        decoder_sparse_step: Num = 1
        mlp_only_layers: list[int] | None = None
        num_nextn_predict_layers: int = 1  # config.json does not count them

        @property
        def routing(self) -> Routing:
            return Routing(self.num_experts_per_tok, min_sum=0.0 if self.norm_topk_prob else None)

        def is_sparse(self, layer: int) -> bool:
            is_named = layer in (self.mlp_only_layers or [])
            return not is_named and (layer + 1) % self.decoder_sparse_step == 0

    config: Config


class Qwen3_5ForCausalLM(HybridLM):  # noqa: N801, its name in config.json
    Config = HybridConfig


class Qwen3_5ForConditionalGeneration(Qwen3_5ForCausalLM):  # noqa: N801
    """The text part."""


MiniCPMV4_6ForConditionalGeneration = Qwen3_5ForConditionalGeneration


class Qwen3_5MoeForCausalLM(SparseHybridLM):  # noqa: N801
    Config = SparseHybridConfig


class Qwen3_5MoeForConditionalGeneration(Qwen3_5MoeForCausalLM):  # noqa: N801
    """The text part."""
