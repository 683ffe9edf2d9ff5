"""Qwen3-VL (arXiv 2511.21631): the text part, a Qwen3, without or with experts."""

from typing import ClassVar

from services.worker.models.qwen2_5_vl import AxesConfig
from services.worker.models.qwen3 import Qwen3ForCausalLM
from services.worker.models.qwen3_moe import Qwen3MoeForCausalLM


class Qwen3VLForConditionalGeneration(Qwen3ForCausalLM):
    class Config(AxesConfig, Qwen3ForCausalLM.Config, frozen=True):
        mixed: ClassVar[bool] = True

    config: Config


class Qwen3VLMoeForConditionalGeneration(Qwen3MoeForCausalLM):
    class Config(AxesConfig, Qwen3MoeForCausalLM.Config, frozen=True, kw_only=True):
        mixed: ClassVar[bool] = True
        norm_topk_prob: bool = True

    config: Config
