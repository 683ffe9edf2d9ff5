"""The prompts that wait for a tokenizer, and when each of them is due."""

from collections.abc import Iterator

from services.gateway.mesh.open_prompt import OpenPrompt


class LostPrompts:
    """Times are monotonic. Pure.

    A prompt is due when its pause or its time to wait is over; while no tokenizer is ready, only
    the latter counts.
    """

    def __init__(self) -> None:
        self._prompts: set[OpenPrompt] = set()

    def __iter__(self) -> Iterator[OpenPrompt]:
        return iter(self._prompts)

    def add(self, prompt: OpenPrompt, now_s: float, at_least_s: float = 0.0) -> None:
        prompt.backoff.wait(now_s, at_least_s)
        self._prompts.add(prompt)

    def discard(self, prompt: OpenPrompt) -> None:
        self._prompts.discard(prompt)

    def take_due(self, now_s: float, is_ready: bool) -> list[OpenPrompt]:
        due = [prompt for prompt in self._prompts if _due_s(prompt, is_ready) <= now_s]
        self._prompts.difference_update(due)
        return due

    def pause_s(self, now_s: float, is_ready: bool) -> float | None:
        """Seconds until the next one is due."""
        due_s = min((_due_s(prompt, is_ready) for prompt in self._prompts), default=None)
        return None if due_s is None else due_s - now_s


def _due_s(prompt: OpenPrompt, is_ready: bool) -> float:
    return (
        min(prompt.backoff.retry_at_s, prompt.replay_until_s) if is_ready else prompt.replay_until_s
    )
