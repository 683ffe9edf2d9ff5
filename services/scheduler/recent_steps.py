"""What a worker does now, by its steps within the last one to two seconds. Pure."""

from dataclasses import dataclass

SPAN_S = 1.0


@dataclass(slots=True)
class _Span:
    started_s: float
    num_steps: int = 0
    num_tokens: int = 0
    step_s: float = 0.0


class RecentSteps:
    """Counts the steps of one worker in two spans, this one and the one before.

    ``num_drafted`` and ``num_accepted`` count its drafts since it came.
    """

    def __init__(self, now_s: float) -> None:
        self._before, self._now = _Span(now_s), _Span(now_s)
        self.num_drafted = self.num_accepted = 0

    def note(self, num_steps: int, num_tokens: int, steps_s: float, now_s: float) -> None:
        """A plan's ``num_steps`` took ``steps_s`` and brought ``num_tokens`` of output."""
        self._roll(now_s)
        self._now.num_steps += num_steps
        self._now.num_tokens += num_tokens
        self._now.step_s += steps_s

    def tokens_per_s(self, now_s: float) -> float:
        self._roll(now_s)
        elapsed_s = now_s - self._before.started_s
        return (self._before.num_tokens + self._now.num_tokens) / max(elapsed_s, SPAN_S)

    def step_s(self, now_s: float) -> float:
        """The mean; 0 where there was no step."""
        self._roll(now_s)
        num_steps = self._before.num_steps + self._now.num_steps
        return (self._before.step_s + self._now.step_s) / num_steps if num_steps else 0.0

    def _roll(self, now_s: float) -> None:
        elapsed_s = now_s - self._now.started_s
        if elapsed_s >= SPAN_S:
            is_recent = elapsed_s < 2 * SPAN_S
            self._before = self._now if is_recent else _Span(now_s - SPAN_S)
            self._now = _Span(now_s)
