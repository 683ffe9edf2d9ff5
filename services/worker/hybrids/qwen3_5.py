"""Qwen3.5 and 3.6, dense and with experts, and the texts of their models that read images too."""

from services.worker.hybrids.delta_hybrid import (
    HybridConfig,
    HybridLM,
    SparseHybridConfig,
    SparseHybridLM,
)


class Qwen3_5ForCausalLM(HybridLM):  # noqa: N801, its name in config.json
    Config = HybridConfig


class Qwen3_5ForConditionalGeneration(Qwen3_5ForCausalLM):  # noqa: N801
    """The text part."""


MiniCPMV4_6ForConditionalGeneration = Qwen3_5ForConditionalGeneration


class Qwen3_5MoeForCausalLM(SparseHybridLM):  # noqa: N801
    Config = SparseHybridConfig


class Qwen3_5MoeForConditionalGeneration(Qwen3_5MoeForCausalLM):  # noqa: N801
    """The text part."""
