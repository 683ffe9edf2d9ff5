"""Brings what a step computed from the device to the slot table and to the scheduler."""

from dataclasses import dataclass

from services.worker.engine.protocol import StepOutput
from services.worker.machine.streams import DeviceEvent
from services.worker.slots.table import SlotTable
from services.worker.step.step import PendingResult, StepRunner
from shared.wire.messages import StepPlan, StepResult


@dataclass
class LaunchedStep:
    """A step that is on the device."""

    plan: StepPlan
    result: PendingResult
    begins: DeviceEvent
    decided: DeviceEvent
    ends: DeviceEvent  # with its drafts


class Collector:
    """Collects steps in order. It keeps the step before, since what the device did after that
    one's result belongs to the next one."""

    def __init__(self, table: SlotTable, runner: StepRunner) -> None:
        self._table = table
        self._runner = runner
        self._last: LaunchedStep | None = None
        self._has_more = False  # sequences were open when the last step was collected

    def forget(self) -> None:
        """Forgets the step before."""
        self._last = None

    def collect(self, launched: LaunchedStep) -> StepOutput:
        """Waits for the step's outcome and returns the result."""
        rows, arrays = self._runner.finish(launched.result)
        step_s, idle_s = self._times(launched)
        self._last, self._has_more = launched, bool(self._table.is_open.any())
        return StepResult(launched.plan.step, rows, step_s, idle_s), arrays

    def _times(self, launched: LaunchedStep) -> tuple[float, float]:
        """Returns the seconds that the step took, with the drafts that it verified, and those for
        which the device had nothing to do before it, while sequences were open."""
        launched.decided.wait()
        step_s = launched.decided.since(launched.begins)
        last = self._last
        if last is None:
            return step_s, 0.0
        step_s += last.ends.since(last.decided)
        return step_s, launched.begins.since(last.ends) if self._has_more else 0.0
