"""Logs one line for each sequence, when it leaves its slot."""

from typing import NamedTuple

from shared.process.log import log_end
from shared.wire.messages import StepPlan


class _Stay(NamedTuple):
    request: str
    attempt: int
    num_steps_before: int


class SlotLog:
    """The sequences that hold slots according to the plans. A sequence that was logged may come
    back, to this worker or another."""

    def __init__(self) -> None:
        self._stays: dict[int, _Stay] = {}
        self._num_steps = 0

    def note(self, plan: StepPlan) -> None:
        for slot in plan.release:
            self._leave(slot)
        for row in plan.admit:
            self._stays[row.slot] = _Stay(row.request, row.attempt, self._num_steps)
        self._num_steps += plan.num_steps

    def clear(self) -> None:
        """The scheduler is gone, and all slots are free."""
        for slot in list(self._stays):
            self._leave(slot)

    def _leave(self, slot: int) -> None:
        stay = self._stays.pop(slot)
        log_end(
            "sequence left its slot",
            stay.request,
            attempt=stay.attempt,
            slot=slot,
            num_steps=self._num_steps - stay.num_steps_before,
        )
