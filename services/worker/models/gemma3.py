"""Gemma 3 (arXiv 2503.19786): queries and keys are normed head by head, and most layers have a
window, with another frequency of the rotary positions."""

from typing import Annotated, Any

import msgspec

from services.worker.config.frequencies import Rope, read_rope
from services.worker.models.gemma2 import GemmaConfig, GemmaLM

GLOBAL_THETA, LOCAL_THETA = 1e6, 1e4
GLOBAL, LOCAL = "full_attention", "sliding_attention"


class Gemma3ForCausalLM(GemmaLM):
    head_norm = "heads"

    class Config(GemmaConfig, frozen=True):
        sliding_window_pattern: Annotated[int, msgspec.Meta(ge=1)] = 6
        rope_local_base_freq: float | None = None

        @property
        def rope_values(self) -> dict[str, Any]:
            """The values of layers that see all keys."""
            nested = self.rope_scaling or self._nested(GLOBAL)
            return self.with_rope_defaults(nested, self.rope_theta or GLOBAL_THETA)

        @property
        def local_rope(self) -> Rope:
            theta = self.rope_local_base_freq or LOCAL_THETA
            return read_rope(self.with_rope_defaults(self._nested(LOCAL), theta))

        def rope_problems(self) -> list[str]:
            problems = super().rope_problems()
            try:
                _ = self.local_rope
            except ValueError as error:
                problems.append(str(error))
            return problems

        def _nested(self, kind: str) -> dict[str, Any]:
            return (self.rope_parameters or {}).get(kind) or {}
