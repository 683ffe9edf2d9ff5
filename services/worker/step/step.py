"""A step, for every engine: lay out → forward → parts → sample → accept → parts → draft.

An engine lays the rows of a plan out as a ``Computation`` and runs it with a ``StepRunner``. Its
backend says where arrays live and when the host can read them: at once on a CPU; on a device when
it has come so far, so that ``forward`` and ``sample`` wait for nothing and ``finish`` runs later.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np
from torch import Tensor

from services.worker.machine.streams import Fetched
from services.worker.slots.table import SlotTable
from services.worker.step.results import (
    NO_LOGPROBS,
    RowPart,
    StepLogprobs,
    StepRows,
    record,
    with_parts,
)
from services.worker.step.rows import Rows
from services.worker.step.sampler import Adjusted, Sampler
from services.worker.step.verify import NOTHING_SAMPLED, AcceptOutcome
from shared.wire.token_arrays import TokenArrays

Note = TypeVar("Note")


@dataclass(frozen=True)
class Backend:
    """Where the arrays of steps live, and when the host can read them."""

    sampler: Sampler
    has_rules: np.ndarray  # [N] bool: slots whose logits rules the computation does not apply
    upload: Callable[[np.ndarray], Tensor]  # to where the model computes
    fetch: Callable[..., Fetched]  # begins to bring tensors, as they are now, to the host
    # The logprobs and ranks [n, most drafts] of the drafts of slots [n].
    fetch_draft_scores: Callable[[np.ndarray], Fetched]
    catch_up: Callable[[], None]  # waits until the results of all earlier steps are in the table


class Acceptance(Protocol):
    """What becomes of sampled tokens, on its way to the host."""

    def candidates(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns the rows [N] int64 of the logits, ascending, whose tokens are emitted, or may be
        where that is not known yet; and for each its index among the rows that sample."""
        ...

    def read(self, table: SlotTable, rows: Rows) -> tuple[Rows, AcceptOutcome]:
        """Waits. Returns the step's ``rows`` as they were computed, without those of sequences that
        ended before, and the outcome."""
        ...


class Sampled(NamedTuple):
    tokens: Tensor  # [S] int64, by row of the logits
    scores: Tensor  # [S, V] float32: logprobs are computed from them
    acceptance: Acceptance
    # Values, ids and ranks of MAX_TOP of the likeliest tokens of each row, if there are such
    # already.
    narrow: tuple[Tensor, ...] = ()


class Places(NamedTuple):
    """The logits of sequences that still run. The ids before a position are those of the table,
    drafts included."""

    rows: np.ndarray  # [n] int64
    slots: np.ndarray  # [n] int64
    positions: np.ndarray  # [n] int64, of the tokens that they are for


class Computation(Protocol):
    """A step that is laid out. The methods are called in this order."""

    def forward(self) -> Tensor:
        """Returns logits [S, V] of the rows that sample."""
        ...

    def places(self) -> "Places":
        """Where the table has the results of all earlier steps."""
        ...

    def sample(self, adjusted: Adjusted | None) -> Sampled:
        """Samples from ``adjusted``, or from the logits, and accepts."""
        ...

    def chunk_states(self) -> Tensor:
        """[T, hidden_size]: the hidden states of the tokens of ``Rows.chunks``."""
        ...


@dataclass(eq=False)
class Step:
    """A step until its tokens are sampled."""

    rows: Rows
    depth: int  # drafts to make of each sequence
    computation: Computation = field(init=False)
    logits: Tensor = field(init=False)
    adjusted: Adjusted | None = None  # to sample from, if not the logits
    sampled: Sampled | None = None  # None where no row samples


@dataclass(eq=False)
class PendingResult:
    """A step from then on, without the memory that it was computed in."""

    rows: Rows
    depth: int
    acceptance: Acceptance | None  # None where no row samples
    notes: list[tuple["StepPart[Any]", Any]]
    outcome: AcceptOutcome = NOTHING_SAMPLED
    logprobs: StepLogprobs = NO_LOGPROBS


class StepPart(Generic[Note]):
    """An optional part of steps, such as logprobs. The engines have the same parts in the same
    order; a step calls the methods in the order below. Steps of sequences of which nothing but
    tokens is wanted have only the parts that ``is_of_every_step``."""

    is_of_every_step = False

    def before_forward(self, step: Step) -> None:
        """The step is laid out."""

    def before_sampling(self, step: Step) -> None:
        """There are logits; may set ``adjusted``."""

    def after_sampling(self, step: Step) -> Note | None:
        """Tokens are sampled, if any row samples, and a device may be busy with them. Returns what
        the methods below need, or None if they have nothing to do in this step."""
        return None

    def after_acceptance(self, result: PendingResult, note: Note) -> None:
        """The host has the outcome, and the table is as before the step; may change ``outcome`` and
        set ``logprobs``."""

    def rows_of(self, result: PendingResult, note: Note) -> list[RowPart]:
        """The step is recorded in the table. Returns further rows of the result."""
        return []


class StepRunner:
    """Runs steps with their ``parts``."""

    def __init__(self, table: SlotTable, parts: Sequence[StepPart[Any]]) -> None:
        self._table = table
        self._parts = parts
        self._plain_parts = [part for part in parts if part.is_of_every_step]

    def forward(self, step: Step) -> None:
        for part in self._parts_of(step):
            part.before_forward(step)
        step.logits = step.computation.forward()

    def sample(self, step: Step) -> PendingResult:
        """Samples and accepts, and begins what the host has to read."""
        acceptance, parts = None, self._parts_of(step)
        if len(step.rows.sampling_rows):
            for part in parts:
                part.before_sampling(step)
            step.sampled = step.computation.sample(step.adjusted)
            acceptance = step.sampled.acceptance
        found = [(part, part.after_sampling(step)) for part in parts]
        notes = [(part, note) for part, note in found if note is not None]
        return PendingResult(step.rows, step.depth, acceptance, notes)

    def _parts_of(self, step: Step) -> Sequence[StepPart[Any]]:
        wants_more = self._table.wants_more[step.rows.slots].any()
        return self._parts if wants_more else self._plain_parts

    def finish(self, result: PendingResult) -> StepRows:
        """Waits for the outcome, records it in the table and returns the rows of the result."""
        table = self._table
        if result.acceptance is None:
            result.rows = result.rows.kept(table.is_open[result.rows.slots])
        else:
            result.rows, result.outcome = result.acceptance.read(table, result.rows)
        for part, note in result.notes:
            part.after_acceptance(result, note)
        rows, emitted = record(table, result.rows, result.outcome, result.logprobs)
        more = [row for part, note in result.notes for row in part.rows_of(result, note)]
        return with_parts(table, rows, TokenArrays(emitted, *result.logprobs.arrays()), more)
