"""ERNIE-4.5-VL (technical report of June 2025): the text part, with experts of texts and others of
images. The config is transformers' or, with keys of both kinds of experts in lists, as published.
"""

from typing import Self

from msgspec import structs

from services.worker.config.model_config import Num
from services.worker.layers.experts import Experts
from services.worker.layers.mlp import Mixture
from services.worker.media.qwen_vl import SECTION, AxesConfig
from services.worker.models.ernie4_5 import ErnieConfig, ErnieMoe
from services.worker.models.parts import Parts


class Ernie4_5_VLMoeForConditionalGeneration(ErnieMoe):  # noqa: N801, its name in config.json
    class Config(AxesConfig, ErnieConfig, frozen=True, kw_only=True):
        moe_num_experts: Num | list[Num]
        moe_intermediate_size: list[Num]
        moe_num_shared_experts: int | None = 0
        moe_layer_start_index: int | list[int] = 1
        moe_layer_end_index: int | list[int] = -1
        mlp_layer_types: list[str] | None = None
        freq_allocation: int = 20  # frequencies of time
        reads_images: bool = True

        @property
        def num_routed_experts(self) -> int:
            found = self.moe_num_experts
            return found if isinstance(found, int) else found[0]

        @property
        def rope_section(self) -> list[int]:
            """Row, column, time."""
            of_places = self.head_dim // 2 - self.freq_allocation
            default = [of_places // 2, of_places // 2, self.freq_allocation]
            section: list[int] = self.rope_values.get(SECTION, default)
            return section

        @property
        def rope_axes(self) -> list[int]:
            """Row and column take turns."""
            rows, _, times = self.rope_section
            return [1, 2] * rows + [0] * times

        def is_sparse(self, layer: int) -> bool:
            if self.mlp_layer_types is not None:
                return self.mlp_layer_types[layer] == "sparse"
            end = max(_each(self.moe_layer_end_index))
            last = self.num_hidden_layers - 1 if end == -1 else end
            is_within = min(_each(self.moe_layer_start_index)) <= layer <= last
            return is_within and (layer + 1) % self.moe_layer_interval == 0

        def for_texts(self) -> Self:
            return structs.replace(self, reads_images=False)

        def problems(self) -> list[str]:
            problems = super().problems()
            if len({*_each(self.moe_num_experts)}) != 1:
                problems.append(
                    f"moe_num_experts {self.moe_num_experts} must be equal for texts and images"
                )
            if len(self.moe_intermediate_size) != 2:
                problems.append(
                    f"moe_intermediate_size {self.moe_intermediate_size} must be two sizes, for"
                    " texts and for images"
                )
            types = self.mlp_layer_types
            if types is not None and len(types) != self.num_hidden_layers:
                problems.append(
                    f"mlp_layer_types has {len(types)} layers, the model {self.num_hidden_layers}"
                )
            return problems

        def rope_problems(self) -> list[str]:
            problems = super().rope_problems()
            if not problems and self.rope_section[0] != self.rope_section[1]:
                problems.append(f"{SECTION} {self.rope_section}: the first two must be equal")
            return problems

    config: Config

    def make_experts(self, parts: Parts) -> Mixture:
        num, (size, of_images) = self.config.num_routed_experts, self.config.moe_intermediate_size
        images = None
        if self.config.reads_images:
            images = Experts(self.make_router(num), parts.experts(num, of_images))
        shared = self.make_shared(parts, size)
        return Mixture(self.make_router(num), parts.experts(num, size), shared, images=images)


def _each(value: int | list[int]) -> list[int]:
    return [value] if isinstance(value, int) else value
