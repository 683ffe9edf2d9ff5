"""Qwen2.5-VL and Qwen3-VL (arXiv 2502.13923, 2511.21631): the text parts, a Qwen2 or a Qwen3,
without or with experts. Positions have three axes, which are equal in texts."""

from collections.abc import Sequence
from typing import Any

from services.worker.config.model_config import ModelConfig
from services.worker.models.qwen import Qwen2ForCausalLM, Qwen3ForCausalLM, WindowsConfig
from services.worker.models.qwen_moe import Qwen3MoeForCausalLM

SECTION = "mrope_section"


def section_problem(section: Any, num: int) -> str:
    """Empty for a section of ``num`` frequencies."""
    is_section = isinstance(section, list) and all(isinstance(each, int) for each in section)
    if is_section and len(section) == 3 and min(section) >= 0 and sum(section) == num:
        return ""
    return (
        f"{SECTION} {section} must be three numbers with the sum {num}, half of the rotated part"
        " of a head"
    )


class AxesConfig(ModelConfig, frozen=True):
    """The section has a number of frequencies for each axis: time, row, column, one after the
    other."""

    @property
    def rope_values(self) -> dict[str, Any]:
        values = super().rope_values
        kind = values.get("rope_type", values.get("type"))
        return values | {"rope_type": "default"} if kind == "mrope" else values

    @property
    def rope_section(self) -> list[int]:
        section: list[int] = self.rope_values.get(SECTION, [])
        return section

    @property
    def rope_axes(self) -> list[int]:
        """The axis of each frequency: time, row, column."""
        return [axis for axis, num in enumerate(self.rope_section) for _ in range(num)]

    def rope_problems(self) -> list[str]:
        problem = section_problem(self.rope_section, self.rotary_dim // 2)
        return [*super().rope_problems(), *filter(None, [problem])]


class Qwen2_5_VLForConditionalGeneration(Qwen2ForCausalLM):  # noqa: N801, its name in config.json
    class Config(AxesConfig, WindowsConfig, frozen=True):
        pass

    config: Config


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
