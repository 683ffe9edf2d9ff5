"""The outcome of one request."""

from dataclasses import dataclass
from typing import Any

from cli.bench.stream import Stream


@dataclass(frozen=True)
class Row:
    """Times are of one clock. ``error`` is empty for a complete answer; otherwise no other figure
    is meaningful. An answer without text has its end as TTFT."""

    due_s: float
    started_s: float
    ended_s: float
    error: str
    max_tokens: int
    input_tokens: int
    output_tokens: int
    ttft_s: float
    itls_s: list[float]

    @staticmethod
    def of(
        stream: Stream, max_tokens: int, due_s: float, started_s: float, ended_s: float, error: str
    ) -> "Row":
        num_in = num_out = 0
        if stream.usage is not None:
            num_in, num_out = stream.usage.prompt_tokens, stream.usage.completion_tokens
        first_s = ended_s if stream.first_s is None else stream.first_s
        return Row(
            *(due_s, started_s, ended_s, error, max_tokens, num_in, num_out),
            *(first_s - started_s, stream.gaps_s),
        )

    @property
    def e2e_s(self) -> float:
        return self.ended_s - self.started_s

    @property
    def tpot_s(self) -> float | None:
        """None without a second token."""
        if self.output_tokens < 2:
            return None
        return (self.e2e_s - self.ttft_s) / (self.output_tokens - 1)

    def meets(self, targets_ms: dict[str, float]) -> bool:
        reached = {"ttft": self.ttft_s, "tpot": self.tpot_s or 0.0, "e2e": self.e2e_s}
        return not self.error and all(
            reached[name] * 1000 <= target for name, target in targets_ms.items()
        )

    def as_dict(self, origin_s: float) -> dict[str, Any]:
        """For JSON, with times relative to ``origin_s``."""
        return {
            "due_s": self.due_s - origin_s,
            "started_s": self.started_s - origin_s,
            "error": self.error,
            "max_tokens": self.max_tokens,
            "input_tokens": self.input_tokens,
            "output_tokens": self.output_tokens,
            "ttft_s": self.ttft_s,
            "tpot_s": self.tpot_s,
            "e2e_s": self.e2e_s,
            "itls_s": self.itls_s,
        }
