"""A step of either engine: lay out → forward → parts → sample → accept → parts → draft.

An engine lays out the rows of a plan as a ``Computation`` and runs it with a ``StepRunner``. Its
``Backend`` defines the place of arrays and the moment the host can read them. A CPU has the results
at once. On a device ``forward`` and ``sample`` launch work, and ``finish`` waits for it later.
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
    """The place of a step's arrays, and the moment the host can read them."""

    sampler: Sampler
    has_rules: np.ndarray  # [N] bool: slots with logits rules for the host to apply
    upload: Callable[[np.ndarray], Tensor]  # to the model's device
    fetch: Callable[..., Fetched]  # starts to copy tensors, as they are now, to the host
    # The logprobs and ranks [n, most drafts] of the drafts of slots [n].
    fetch_draft_scores: Callable[[np.ndarray], Fetched]
    catch_up: Callable[[], None]  # waits until the table has the results of all earlier steps


class Acceptance(Protocol):
    """The outcome for sampled tokens, on its way to the host."""

    def candidates(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns the rows [N] int64 of the logits with emitted tokens, ascending, or all rows if
        the outcome is not known yet; and the index of each among the sampling rows."""

    def read(self, table: SlotTable, rows: Rows) -> tuple[Rows, AcceptOutcome]:
        """Waits. Returns ``rows`` as they were computed, without sequences that had ended before,
        and the outcome."""


class Sampled(NamedTuple):
    tokens: Tensor  # [S] int64, by row of the logits
    scores: Tensor  # [S, V] float32, for logprobs
    acceptance: Acceptance
    # Logprobs of the MAX_TOP likeliest tokens of each row, if computed: values, ids and ranks.
    narrow: tuple[Tensor, ...] = ()


class Places(NamedTuple):
    """The rows of the logits with open slots. The table has the ids before each position, drafts
    included."""

    rows: np.ndarray  # [n] int64
    slots: np.ndarray  # [n] int64
    positions: np.ndarray  # [n] int64, of the tokens to sample


class Computation(Protocol):
    """A laid out step. Its methods are called in this order."""

    def forward(self) -> Tensor:
        """Returns logits [S, V] of the sampling rows."""

    def places(self) -> Places:
        """Called only if the table has the results of all earlier steps."""

    def sample(self, adjusted: Adjusted | None) -> Sampled:
        """Samples from ``adjusted``, or from the logits, and accepts drafts."""

    def chunk_states(self) -> Tensor:
        """[T, hidden_size]: the hidden states of the tokens of ``Rows.chunks``."""


@dataclass(eq=False)
class Step:
    """A step up to sampling."""

    rows: Rows
    depth: int  # drafts to make per sequence
    computation: Computation = field(init=False)
    logits: Tensor = field(init=False)
    adjusted: Adjusted | None = None  # None: sample from the logits
    sampled: Sampled | None = None  # None if no row samples


@dataclass(eq=False)
class PendingResult:
    """A step after sampling, without the tensors of its computation."""

    rows: Rows
    depth: int
    acceptance: Acceptance | None  # None if no row samples
    notes: list[tuple["StepPart[Any]", Any]]
    outcome: AcceptOutcome = NOTHING_SAMPLED
    logprobs: StepLogprobs = NO_LOGPROBS


class StepPart(Generic[Note]):
    """An optional part of a step, for example logprobs. Its methods are called in the order below.

    If all sequences of a step want only tokens (``SlotTable.wants_more``), it skips the parts
    without ``is_of_every_step``.
    """

    is_of_every_step = False

    def before_forward(self, step: Step) -> None:
        """Called after the layout, before the forward pass."""

    def before_sampling(self, step: Step) -> None:
        """Called with the logits, if a row samples; may set ``adjusted``."""

    def after_sampling(self, step: Step) -> Note | None:
        """Called once sampling is launched, or at once if no row samples. Returns a note for the
        methods below, or None to skip them in this step."""
        return None

    def after_acceptance(self, result: PendingResult, note: Note) -> None:
        """Called with the outcome, before the step is recorded in the table; may change ``outcome``
        and set ``logprobs``."""

    def rows_of(self, result: PendingResult, note: Note) -> list[RowPart]:
        """Called after the step is recorded in the table. Returns further rows of the result."""
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
        """Samples, accepts drafts and starts the copies to the host."""
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
