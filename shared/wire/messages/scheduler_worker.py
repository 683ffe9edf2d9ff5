"""Messages between a scheduler and a worker, and between the ranks of a worker."""

from msgspec import Raw

from shared.wire.messages.ranges import (
    EMPTY_ROW,
    FinishReason,
    Int32,
    Int64,
    Name,
    NumSteps,
    Reason,
    Row,
    Seconds,
)
from shared.wire.messages.rows import SamplingParams, SpanReport, TokenRun


class Admit(Row, frozen=True):
    """A sequence enters a slot. It brings all known ids: the prompt, then what was emitted before.

    ``route`` groups the rows of a StepResult by the peer they go to. ``num_ids`` counts this row's
    ids in the plan's buffer, of which the first ``prompt_len`` are the prompt; ``num_cached`` of
    them have their KV in ``blocks`` already. ``num_prompt_scored``: as in ChoiceStart. ``options``
    and ``old_is_traced``: as in Submit.
    """

    slot: Int32
    request: Name
    attempt: Int32
    route: Int64
    choice: Int32
    prompt_len: Int32
    num_ids: Int32
    num_cached: Int32
    params: SamplingParams
    blocks: list[Int32]
    num_prompt_scored: Int32 = 0
    old_is_traced: bool = False
    options: Raw = EMPTY_ROW


class Extend(Row, frozen=True):
    slot: Int32
    blocks: list[Int32]


class Prefill(Row, frozen=True):
    slot: Int32
    num_tokens: Int32


class Decode(Row, frozen=True):
    """One token, and up to ``verify_depth`` of the slot's drafts are verified beside it."""

    slot: Int32
    verify_depth: Int32 = 0


class StepPlan(Row, tag=13, frozen=True):
    """Scheduler → worker: a step, or several, as a difference to the slots the worker holds.

    Applied in the order of the fields: a slot may be released and admitted anew in one plan.
    ``draft_depth``: how many drafts to make of each sequence that samples, for the next step.
    ``num_steps``: a plan that only decodes may ask for several. Each computes the same rows but
    for the sequences that have ended, with the token that was sampled last as the input.
    Buffer 0: int32 known ids of all ``admit`` rows, concatenated.
    """

    step: Int64
    release: list[Int32]
    admit: list[Admit]
    extend: list[Extend]
    prefill: list[Prefill]
    decode: list[Decode]
    draft_depth: Int32 = 0
    num_steps: NumSteps = 1


class Reset(Row, tag=18, frozen=True):
    """First rank of a worker → its others: the scheduler is gone, forget all sequences."""


class Assemble(Row, tag=32, frozen=True):
    """First rank of a worker → its others: all are connected, so load the model and meet."""


class ResultRow(Row, frozen=True):
    """What one slot emitted in a step; rows are ordered by route. ``error`` fails the request, for
    what the client asks if there is a ``code`` for it, else for what is wrong here.

    A slot may have several rows, side by side: of its prompt, of its drafts, then of its output;
    where the plan asked for several steps, those of one step after those of another.
    """

    slot: Int32
    request: Name
    attempt: Int32
    run: TokenRun
    finish: FinishReason | None = None
    error: Reason | None = None
    code: Name = ""


class StepResult(Row, tag=23, frozen=True):
    """Worker → scheduler: the rows that emitted or ended. Buffers: as Tokens.

    The step took ``step_s``, after ``idle_s`` of waiting for its plan. It was ``num_steps`` steps:
    fewer than the plan asked for where all sequences have ended before.
    """

    step: Int64
    rows: list[ResultRow]
    step_s: Seconds = 0.0
    idle_s: Seconds = 0.0
    spans: list[SpanReport] = []
    num_steps: NumSteps = 1


class Release(Row, tag=25, frozen=True):
    """Worker → scheduler: take back my sequences, I leave before they would end. They go to others
    one at a time; at a second Release, all that are left."""


class Attach(Row, tag=30, frozen=True):
    """Worker → scheduler: plan for me. It is attached to no other. One below ``CELLS_MINOR`` sends
    none, and is attached from its Hello on."""


class Detach(Row, tag=31, frozen=True):
    """Worker → scheduler: plan for me no more. What it had of you it has forgotten."""
