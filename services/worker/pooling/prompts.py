"""Pools the hidden states of prompts, chunk by chunk, as rows of a StepResult.

Each prompt is computed separately in float32, so other sequences of the step do not change its
result. A mean is accumulated token by token in float64, so chunk boundaries do not change it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from kernels.sample import NOT_FINITE
from services.worker.machine.streams import Fetched
from services.worker.slots.table import SlotTable
from services.worker.step.results import ERRORS, RowPart
from services.worker.step.rows import Rows
from services.worker.step.step import Backend, PendingResult, Step, StepPart
from shared.wire.messages import NO_TOKENS, Activation, Pooling, ResultRow, RunKind, TokenRun
from shared.wire.token_arrays import TokenArrays

SUM_PIECE = 512  # states per cumulative sum

ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "none": lambda x: x,
    "normalize": lambda x: x / _norm(x).clamp(min=1e-12),
    "sigmoid": torch.sigmoid,
    "softmax": lambda x: functional.softmax(x, -1),
}


class _Pooled(NamedTuple):
    slots: list[int]
    fetched: Fetched  # [n, num_values]: the pooled prompts


@dataclass(frozen=True, slots=True)
class _Chunk:
    """States ``first`` to ``last`` − 1 of a step: tokens of a prompt from position ``start`` on."""

    slot: int
    pooling: Pooling
    start: int
    first: int
    last: int
    ends_prompt: bool


class StatePooler:
    """``normed`` applies the last norm to states [n, hidden_size], in float32. ``head`` [size,
    hidden_size] float32 maps a state to class logits; None: pooled states are the result."""

    def __init__(self, normed: Callable[[Tensor], Tensor], head: Tensor | None) -> None:
        self._normed = normed
        self._head = head
        # By slot, for prompts in progress: the sum of a mean, or the first state.
        self._partial: dict[int, Tensor] = {}

    def part(self, table: SlotTable, backend: Backend) -> StepPart[list[_Pooled]]:
        return PooledPrompts(table, backend, self)

    def pool(self, table: SlotTable, rows: Rows, hidden: Tensor) -> list[tuple[Tensor, list[int]]]:
        """Takes the chunks of a step with their states ``hidden`` [T, hidden_size]. Returns the
        vectors [n, num_values] and slots of prompts that end in it, grouped by Pooling."""
        starts, nums = rows.starts, rows.num_tokens
        lasts, is_end = rows.token_ends, rows.ends == table.prompt_lens[rows.slots]
        columns = rows.slots, starts, lasts - nums, lasts, is_end
        chunks = []
        for slot, start, first, last, ends in zip(
            *(each.tolist() for each in columns), strict=True
        ):
            pooling = table.params[slot].pooling
            if pooling is not None:
                chunks.append(_Chunk(slot, pooling, start, first, last, ends))
        states = self._single_states(chunks, hidden)
        for chunk in chunks:
            if chunk.pooling.pooling_type == "mean":
                self._add(chunk, hidden)
        found: dict[Pooling, dict[int, Tensor]] = {}
        for chunk in chunks:
            if chunk.ends_prompt:
                state = self._pooled(chunk, table, states)
                found.setdefault(chunk.pooling, {})[chunk.slot] = state
        return [
            (self._answers(torch.stack(list(by_slot.values())), pooling), list(by_slot))
            for pooling, by_slot in found.items()
        ]

    def _single_states(self, chunks: Sequence[_Chunk], hidden: Tensor) -> dict[int, Tensor]:
        """The normed states of "last" and "cls" pooling, by slot. Keeps "cls" states to the end."""
        rows: dict[int, int] = {}
        for chunk in chunks:
            if chunk.pooling.pooling_type == "last" and chunk.ends_prompt:
                rows[chunk.slot] = chunk.last - 1
            elif chunk.pooling.pooling_type == "cls" and chunk.start == 0:
                rows[chunk.slot] = chunk.first
        if not rows:
            return {}
        indices = torch.tensor(list(rows.values()), device=hidden.device)
        states = dict(zip(rows, self._normed(hidden[indices]).unbind(), strict=True))
        for chunk in chunks:
            if chunk.pooling.pooling_type == "cls" and chunk.slot in states:
                self._partial[chunk.slot] = states[chunk.slot].clone()
        return states

    def _add(self, chunk: _Chunk, hidden: Tensor) -> None:
        total = self._partial.get(chunk.slot) if chunk.start else None
        for first in range(chunk.first, chunk.last, SUM_PIECE):
            piece = hidden[first : min(first + SUM_PIECE, chunk.last)]
            states = self._normed(piece).double()
            if total is not None:
                states = torch.cat([total.unsqueeze(0), states])
            total = states.cumsum(0)[-1]
        assert total is not None
        self._partial[chunk.slot] = total.clone()

    def _pooled(self, chunk: _Chunk, table: SlotTable, states: Mapping[int, Tensor]) -> Tensor:
        match chunk.pooling.pooling_type:
            case "last":
                return states[chunk.slot]
            case "cls":
                return self._partial.pop(chunk.slot)
            case "mean":
                total = self._partial.pop(chunk.slot)
                return (total / int(table.prompt_lens[chunk.slot])).float()

    def _answers(self, states: Tensor, pooling: Pooling) -> Tensor:
        """[n, hidden_size] → [n, num_values]"""
        if self._head is not None:
            states = torch.stack([(self._head * state).sum(-1) for state in states])
        if pooling.num_dims:
            states = states[:, : pooling.num_dims]
        return ACTIVATIONS[pooling.activation](states)


class PooledPrompts(StepPart[list[_Pooled]]):
    """Pools prompts that end in a step and closes their slots."""

    is_of_every_step = True

    def __init__(self, table: SlotTable, backend: Backend, pooler: StatePooler) -> None:
        self._table = table
        self._backend = backend
        self._pooler = pooler

    def after_sampling(self, step: Step) -> list[_Pooled] | None:
        if not step.rows.has_chunks:
            return None
        chunks = step.rows.chunks
        pooled = self._pooler.pool(self._table, chunks, step.computation.chunk_states())
        return [_Pooled(slots, self._backend.fetch(values)) for values, slots in pooled]

    def rows_of(self, result: PendingResult, note: list[_Pooled]) -> list[RowPart]:
        return [
            self._row(slot, values)
            for slots, fetched in note
            for slot, values in zip(slots, fetched.wait()[0], strict=True)
        ]

    def _row(self, slot: int, values: np.ndarray) -> RowPart:
        table = self._table
        table.is_open[slot] = False
        request, attempt = table.requests[slot]
        if not np.isfinite(values).all():
            row = ResultRow(slot, request, attempt, NO_TOKENS, error=ERRORS[NOT_FINITE])
            return RowPart(row, TokenArrays())
        last = table.prompt_lens[slot] - 1
        arrays = TokenArrays(
            table.ids[slot, last : last + 1].copy(), values, ranks=np.zeros(1, np.int32)
        )
        run = TokenRun(1, len(values), kind=RunKind.POOLED)
        return RowPart(ResultRow(slot, request, attempt, run, "length"), arrays)


def _norm(x: Tensor) -> Tensor:
    return x.square().sum(-1, keepdim=True).sqrt()
