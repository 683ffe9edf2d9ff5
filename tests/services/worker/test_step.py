"""The order of a step, and which of its parts it runs."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from services.worker.slots.table import SlotTable
from services.worker.step.results import RowPart
from services.worker.step.rows import Rows
from services.worker.step.sampler import Adjusted
from services.worker.step.step import PendingResult, Places, Sampled, Step, StepPart, StepRunner
from services.worker.step.verify import verify
from shared.wire.messages import Capacity

EOS_IDS = np.array([0])
ALL = ["before_forward", "forward", "before_sampling", "sample", "after_sampling"]
BEHIND = ["after_acceptance", "rows_of"]


class Noted(StepPart[str]):
    """Notes its calls; has something to do if it ``takes_part``."""

    def __init__(self, calls: list[str], takes_part: bool = True, is_of_every_step: bool = True):
        self._calls = calls
        self._takes_part = takes_part
        self.is_of_every_step = is_of_every_step

    def before_forward(self, step: Step) -> None:
        self._calls.append("before_forward")

    def before_sampling(self, step: Step) -> None:
        self._calls.append("before_sampling")

    def after_sampling(self, step: Step) -> str | None:
        self._calls.append("after_sampling")
        return "note" if self._takes_part else None

    def after_acceptance(self, result: PendingResult, note: str) -> None:
        assert (note, result.outcome.emitted.tolist()) == ("note", [7])
        self._calls.append("after_acceptance")

    def rows_of(self, result: PendingResult, note: str) -> list[RowPart]:
        self._calls.append("rows_of")
        return []


class FakeComputation:
    """Slot 0 samples 7."""

    def __init__(self, table: SlotTable, rows: Rows, calls: list[str]) -> None:
        self._table = table
        self._rows = rows
        self._calls = calls

    def forward(self) -> Tensor:
        self._calls.append("forward")
        return torch.zeros(1, 9)

    def sample(self, adjusted: Adjusted | None) -> Sampled:
        self._calls.append("sample")
        tokens = np.array([7])
        outcome = verify(self._table, self._rows, tokens, EOS_IDS)
        return Sampled(torch.from_numpy(tokens), torch.zeros(1, 9), outcome)

    def places(self) -> Places:
        raise NotImplementedError

    def chunk_states(self) -> Tensor:
        raise NotImplementedError


def run(calls: list[str], *parts: StepPart[Any], wants_more: bool = True, samples: bool = True):
    table = SlotTable(Capacity(8, 4, 2, 64, 12, 10))
    table.is_open[0], table.num_tokens[0], table.end[0] = True, 4, 9
    table.wants_more[0] = wants_more
    zero = np.zeros(1, np.int64)
    rows = Rows(zero, zero + 3, zero + 1, zero, zero, zero if samples else zero[:0])
    step, runner = Step(rows, depth=0), StepRunner(table, parts)
    step.computation = FakeComputation(table, rows, calls)
    runner.forward(step)
    result = runner.sample(step)
    found, arrays = runner.finish(result)
    assert [row.slot for row in found] == ([0] if samples else [])
    assert arrays.ids.tolist() == ([7] if samples else [])


def test_a_part_is_asked_in_the_order_of_the_step() -> None:
    calls: list[str] = []
    run(calls, Noted(calls))
    assert calls == ALL + BEHIND


def test_a_part_without_a_note_is_not_asked_again() -> None:
    calls: list[str] = []
    run(calls, Noted(calls, takes_part=False))
    assert calls == ALL


def test_parts_that_no_sequence_asked_for_are_skipped() -> None:
    calls: list[str] = []
    run(calls, Noted(calls, is_of_every_step=False), wants_more=False)
    assert calls == ["forward", "sample"]


def test_without_rows_that_sample_nothing_is_sampled() -> None:
    calls: list[str] = []
    run(calls, Noted(calls, takes_part=False), samples=False)
    assert calls == ["before_forward", "forward", "after_sampling"]
