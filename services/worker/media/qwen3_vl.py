"""Qwen3-VL (arXiv 2511.21631): the text part, a Qwen3, without or with experts."""

from collections.abc import Sequence

from services.worker.media.qwen2_5_vl import AxesConfig
from services.worker.models.qwen3 import Qwen3ForCausalLM
from services.worker.models.qwen3_moe import Qwen3MoeForCausalLM


def mixed_axes(section: Sequence[int]) -> list[int]:
    """The axis of each frequency: rows and columns take turns with times as long as they have
    frequencies."""
    turns = ((place, place % 3) for place in range(sum(section)))
    return [axis if place < 3 * section[axis] else 0 for place, axis in turns]


class MixedConfig(AxesConfig, frozen=True):
    @property
    def rope_axes(self) -> list[int]:
        return mixed_axes(self.rope_section)


class Qwen3VLForConditionalGeneration(Qwen3ForCausalLM):
    class Config(MixedConfig, Qwen3ForCausalLM.Config, frozen=True):
        pass

    config: Config


class Qwen3VLMoeForConditionalGeneration(Qwen3MoeForCausalLM):
    class Config(MixedConfig, Qwen3MoeForCausalLM.Config, frozen=True, kw_only=True):
        norm_topk_prob: bool = True

    config: Config
