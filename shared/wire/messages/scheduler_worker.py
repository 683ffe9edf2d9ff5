"""Messages between a scheduler and a worker, and between the ranks of a worker."""

from msgspec import Raw

from shared.wire.messages.media import Items
from shared.wire.messages.moves import Discard, Push, Take
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
from shared.wire.messages.stores import Fetch, Forget, Load, Save, Spill, Unfetch


class Admit(Row, frozen=True):
    """A sequence enters a slot with all its known ids: the prompt, then earlier output.

    ``route`` groups the rows of a StepResult by their destination. ``num_ids`` counts this row's
    ids in the plan's buffer, of which the first ``prompt_len`` are the prompt and the first
    ``num_cached`` have their KV in ``blocks``, and in ``more_blocks`` of each further group of
    layers. There ``Capacity.num_blocks`` stands for a block behind the group's window.
    The state of its ``num_cached`` ids is the copy ``from_state``; ``to_state``: as in Keep. If
    both are one copy, it may be loaded later, before a token of the slot is computed.
    ``num_prompt_scored``: as in ChoiceStart. ``options`` and ``old_is_traced``: as in Submit.
    ``items`` are the images of the prompt. The worker encodes the ones that end behind
    ``num_cached``, and sends Encoded.
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
    more_blocks: list[list[Int32]] = []
    from_state: Int32 | None = None
    to_state: Int32 | None = None
    items: Items = []


class Extend(Row, frozen=True):
    """Blocks of the first group of layers, and of each further one."""

    slot: Int32
    blocks: list[Int32]
    more_blocks: list[list[Int32]] = []


class Drop(Row, tag=1, frozen=True):
    """The first ``num_blocks`` blocks of a slot in a ``group`` are behind its window, and leave
    it."""

    slot: Int32
    group: Int32
    num_blocks: Int32


class Keep(Row, tag=2, frozen=True):
    """The last copy of a slot's state stays. The copies at later multiples of ``copy_interval`` ids
    go to ``to_state``, each over the one before; None: no more are made."""

    slot: Int32
    to_state: Int32 | None


PlanRow = Drop | Keep | Load | Save | Forget | Push | Take | Discard | Spill | Fetch | Unfetch


class Prefill(Row, frozen=True):
    slot: Int32
    num_tokens: Int32


class Decode(Row, frozen=True):
    """Computes one token, and verifies up to ``verify_depth`` of the slot's drafts with it."""

    slot: Int32
    verify_depth: Int32 = 0


class StepPlan(Row, tag=13, frozen=True):
    """Scheduler → worker: one step or several, as a difference to the worker's slots.

    Applied in the order of the fields, ``rows`` after ``release``: a plan may release a slot and
    admit a sequence to it. ``draft_depth`` is the number of drafts to make of each sampling
    sequence, for the next step. ``num_steps``: a decode-only plan may have several. Each computes
    the same rows, except ended sequences, with the last sampled token as input. Buffers:
    int32 known ids of all ``admit`` rows, concatenated; the pixels of each different digest in
    their items that end behind ``num_cached``, in order.
    """

    step: Int64
    release: list[Int32]
    admit: list[Admit]
    extend: list[Extend]
    prefill: list[Prefill]
    decode: list[Decode]
    draft_depth: Int32 = 0
    num_steps: NumSteps = 1
    rows: list[PlanRow] = []

    @property
    def drops(self) -> list[Drop]:
        return [row for row in self.rows if isinstance(row, Drop)]

    @property
    def keeps(self) -> list[Keep]:
        return [row for row in self.rows if isinstance(row, Keep)]


class Reset(Row, tag=18, frozen=True):
    """First rank of a worker → its others: the scheduler is lost, forget all sequences."""


class Assemble(Row, tag=32, frozen=True):
    """First rank of a worker → its others: all ranks are connected, so load the model and form the
    group."""


class ResultRow(Row, frozen=True):
    """The tokens of one slot in a step; rows are ordered by route. ``error`` fails the request;
    with a ``code`` the request itself is at fault, without one the worker.

    A slot may have several rows, side by side: prompt, drafts, then output, for each step of the
    plan in turn.
    """

    slot: Int32
    request: Name
    attempt: Int32
    run: TokenRun
    finish: FinishReason | None = None
    error: Reason | None = None
    code: Name = ""


class StepResult(Row, tag=23, frozen=True):
    """Worker → scheduler: the rows with tokens or an end. Buffers: as Tokens.

    The step took ``step_s``, after ``idle_s`` of waiting for its plan. ``num_steps`` is lower than
    the plan's if all sequences ended before.
    """

    step: Int64
    rows: list[ResultRow]
    step_s: Seconds = 0.0
    idle_s: Seconds = 0.0
    spans: list[SpanReport] = []
    num_steps: NumSteps = 1


class Release(Row, tag=25, frozen=True):
    """Worker → scheduler: I leave before my sequences end, hand them over one at a time. A second
    Release hands over all that are left."""


class Attach(Row, tag=30, frozen=True):
    """Worker → scheduler: plan for me. The worker is attached to no other. A worker below
    ``CELLS_MINOR`` sends none, and is attached from its Hello on."""


class Detach(Row, tag=31, frozen=True):
    """Worker → scheduler: stop planning for me. The worker has forgotten its sequences."""
