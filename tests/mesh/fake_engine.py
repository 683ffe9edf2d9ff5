"""An engine without a model, for tests that do not depend on the model."""

import time
from collections import Counter
from collections.abc import Callable

import numpy as np
from msgspec.structs import replace

from benchmarks.harness.step_engine import StepEngine
from services.scheduler.scheduler import Planned
from services.worker.engine.host import IdleTime
from shared.wire.messages import (
    ALL_TOKENS,
    Capacity,
    ModelInfo,
    ResultRow,
    RunKind,
    StepPlan,
    StepResult,
    TokenRun,
)
from shared.wire.token_arrays import Layout, TokenArrays, join
from tests.services.scheduler.simulated_worker import SimulatedWorker, Slot


def made_up_logprobs(position: int, vocab_size: int) -> np.ndarray:
    """FakeEngine's logprobs of the ``position``-th token of a completion, float32 [vocab_size].

    They are distinct if ``vocab_size`` is a power of two.
    """
    order = (np.arange(vocab_size) * 31 + position * 7) % vocab_size
    return ((order + 1) / -16).astype(np.float32)


def made_up_arrays(token: int, position: int, vocab_size: int, num: int | None) -> TokenArrays:
    """All buffers of one token with ``num`` requested logprobs; ``position`` counts from the first
    sampled token."""
    ids = np.array([token], np.int32)
    if num is None:
        return TokenArrays(ids)
    truth = made_up_logprobs(position, vocab_size)
    own = truth[token : token + 1]
    rank = 1 + (truth > own).sum(keepdims=True, dtype=np.int32)
    if num == ALL_TOKENS or num >= vocab_size:
        return TokenArrays(ids, np.concatenate((own, truth)), ranks=rank)
    top_ids = np.argsort(-truth, kind="stable")[:num].astype(np.int32)
    return TokenArrays(ids, np.concatenate((own, truth[top_ids])), top_ids, rank)


class FakeEngine(StepEngine):
    """Writes ``ids`` over and over, one per step; checks every plan.

    ``starts_at`` returns the index at which a choice of a prompt begins.
    """

    def __init__(
        self, model_info: ModelInfo, capacity: Capacity, ids: list[int], step_s: float
    ) -> None:
        self.model_info = model_info
        self.capacity = capacity
        self.step_s = step_s
        self.starts_at: Callable[[list[int], int], int] = lambda prompt_ids, choice: 0
        self.ids = ids
        self._idle_time = IdleTime()
        self.reset()

    @property
    def num_running(self) -> int:
        return len(self._worker.slots)

    def reset(self) -> None:
        self._worker = SimulatedWorker(self.capacity, write=self._next_id)
        self._idle_time.forget()

    def step(self, plan: StepPlan, ids: np.ndarray) -> tuple[StepResult, TokenArrays]:
        idle_s = self._idle_time.begin_step(time.monotonic())
        time.sleep(self.step_s * plan.num_steps)
        result, emitted = self._worker.step(Planned(plan, ids))
        layout = Layout(result.rows, emitted)
        num_left = Counter(row.slot for row in result.rows if row.run.kind == RunKind.OUTPUT)
        parts = []
        for index, row in enumerate(result.rows):
            own: list[int] = layout.part(index, index + 1).ids.tolist()
            if row.run.kind == RunKind.PROMPT:
                parts.append(self._prompt_arrays(row, own))
            else:
                parts.append(self._arrays(row, own[0], num_left[row.slot]))
                num_left[row.slot] -= 1
        rows = [
            replace(row, run=_widened(row.run, part))
            for row, part in zip(result.rows, parts, strict=True)
        ]
        arrays = join(parts) if parts else TokenArrays()
        self._idle_time.end_step(time.monotonic(), self.num_running)
        step_s = self.step_s * result.num_steps
        return replace(result, rows=rows, step_s=step_s, idle_s=idle_s), arrays

    def _prompt_arrays(self, row: ResultRow, ids: list[int]) -> TokenArrays:
        slot = self._worker.slots[row.slot]
        first = slot.num_prompt_scored - len(ids) + 1 - slot.admit.prompt_len
        num, vocab_size = slot.admit.params.prompt_logprobs, self.model_info.vocab_size
        parts = [
            made_up_arrays(token, position, vocab_size, num)
            for position, token in enumerate(ids, first)
        ]
        return join(parts) if parts else TokenArrays()

    def _next_id(self, slot: Slot) -> int:
        position = len(slot.ids) - slot.admit.prompt_len
        start = self.starts_at(slot.ids[: slot.admit.prompt_len], slot.admit.choice)
        return self.ids[(start + position) % len(self.ids)]

    def _arrays(self, row: ResultRow, token: int, num_left: int) -> TokenArrays:
        """``num_left`` tokens of its slot are in this row and later ones."""
        slot = self._worker.slots[row.slot]
        position = len(slot.ids) - slot.admit.prompt_len - num_left
        num = slot.admit.params.logprobs
        return made_up_arrays(token, position, self.model_info.vocab_size, num)


def _widened(run: TokenRun, part: TokenArrays) -> TokenRun:
    num = max(1, run.num_tokens)
    return replace(run, num_values=len(part.values) // num, num_top_ids=len(part.top_ids) // num)
