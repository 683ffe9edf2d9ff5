"""Checks a StepResult against its plan before any of it is used, and applies its rows. No IO."""

from dataclasses import dataclass

import msgspec

from services.scheduler.allocation import Allocation
from services.scheduler.sequence import Sequence
from services.scheduler.worker_state import WorkerState
from shared.errors import CodecError, InternalError, InvalidRequest, RequestError
from shared.wire.faults import ids_fault, logprobs_fault
from shared.wire.messages import ResultRow, RunKind, StepResult
from shared.wire.token_arrays import TokenArrays, bytes_of

NOTHING = -1
END = len(RunKind)  # above every kind: a slot has no row after its end


@dataclass(slots=True)
class _Came:
    """The rows of a slot so far: the ``last`` kind of the current step, the number of output
    tokens, and of steps."""

    last: int = NOTHING
    num_tokens: int = 0
    num_steps: int = 0

    def note(self, row: ResultRow, num_steps: int) -> None:
        """Counts ``row`` of a result of ``num_steps``, each with drafts and tokens of its own."""
        self.last = row.run.kind
        if row.run.kind == RunKind.OUTPUT:
            self.num_tokens += row.run.num_tokens
            self.num_steps += 1
            if self.num_steps < num_steps:
                self.last = RunKind.PROMPT
        if row.finish or row.error is not None:
            self.last = END


def check_result(worker: WorkerState, result: StepResult, arrays: TokenArrays) -> None:
    """Raises CodecError for a result that no plan of ``worker`` can have. Rows of sequences that no
    longer run there are ignored."""
    vocab_size = worker.capacity.vocab_size
    fault = ids_fault(arrays.ids, vocab_size) or ids_fault(arrays.top_ids, vocab_size)
    if fault := fault or logprobs_fault(arrays.values):
        raise CodecError(f"the result has {fault}")
    most = worker.in_flight[0].num_steps if worker.in_flight else 1
    if result.num_steps > most:
        raise CodecError(f"the result is of {result.num_steps} steps, the plan asked for {most}")
    came: dict[int, _Came] = {}
    for row in result.rows:
        sequence = worker.running.get(row.slot)
        if sequence is None or not sequence.is_of(row):
            continue
        before = came.setdefault(row.slot, _Came())
        if row.run.kind <= before.last:
            raise CodecError(f"slot {row.slot} has two rows of a kind, or one after its end")
        if fault := _FAULTS[row.run.kind](worker, sequence, row, before):
            raise CodecError(f"slot {row.slot}: {fault}")
        before.note(row, result.num_steps)
    if any(each.last == RunKind.DRAFTS for each in came.values()):
        raise CodecError("drafts came without the tokens they are for")


def _prompt_fault(
    worker: WorkerState, sequence: Sequence, row: ResultRow, before: _Came
) -> str | None:
    num_prompt_scored = sequence.num_prompt_scored + row.run.num_tokens
    is_asked = sequence.params.prompt_logprobs is not None
    if sequence.params.pooling is not None:
        return "its prompt is pooled"
    if row.run.num_tokens and (not is_asked or num_prompt_scored >= len(sequence.prompt)):
        return f"{num_prompt_scored} tokens of a prompt are scored, it has {len(sequence.prompt)}"
    return None


def _drafts_fault(
    worker: WorkerState, sequence: Sequence, row: ResultRow, before: _Came
) -> str | None:
    run, most = row.run, worker.capacity.num_speculative_tokens
    if row.finish or row.error is not None or not run.num_accepted <= run.num_tokens <= most:
        return f"{run.num_accepted} of {run.num_tokens} drafts were right; there are up to {most}"
    return None


def _tokens_fault(
    worker: WorkerState, sequence: Sequence, row: ResultRow, before: _Came
) -> str | None:
    run = row.run
    if row.error is not None:
        return "an error with tokens" if run.num_tokens else None
    pending = sequence.allocated.pending
    if not pending:
        return "no plan has sampled for it"
    _, num_expected = pending[0]
    room = min(num_expected, worker.end_of(sequence) - sequence.num_known) - before.num_tokens
    if run.num_tokens > room or (row.finish and not run.num_tokens):
        return f"{run.num_tokens} tokens where {room} belong"
    most = min(run.num_drafts, run.num_tokens)
    if run.num_accepted > most or run.num_drafts > worker.capacity.num_speculative_tokens:
        return f"{run.num_accepted} of {run.num_drafts} drafts are among {run.num_tokens} tokens"
    return None


def _pooled_fault(
    worker: WorkerState, sequence: Sequence, row: ResultRow, before: _Came
) -> str | None:
    run, pooling = row.run, sequence.params.pooling
    if pooling is None or not sequence.allocated.pending:
        return "its prompt is not pooled, or not computed to its end"
    num_values = pooling.num_dims or worker.capacity.pooled_size
    is_whole = (run.num_tokens, run.num_values, run.num_top_ids) == (1, num_values, 0)
    if row.finish is None or not is_whole:
        return f"{run.num_tokens} times {run.num_values} numbers; {num_values} belong, and its end"
    return None


_FAULTS = {
    RunKind.PROMPT: _prompt_fault,
    RunKind.DRAFTS: _drafts_fault,
    RunKind.OUTPUT: _tokens_fault,
    RunKind.POOLED: _pooled_fault,
}


class Emission(msgspec.Struct, frozen=True, gc=False):  # no reference cycle contains it
    """Row ``index`` of a StepResult. ``position`` is the number of output tokens (for a prompt run:
    of scored prompt tokens) the sequence had before it."""

    sequence: Sequence
    index: int
    row: ResultRow
    position: int

    @property
    def ends(self) -> bool:
        return self.row.finish is not None or self.row.error is not None

    @property
    def has_output(self) -> bool:
        return self.row.run.kind == RunKind.OUTPUT

    @property
    def error(self) -> RequestError | None:
        row = self.row
        if row.error is None:
            return None
        return InvalidRequest(row.error, code=row.code) if row.code else InternalError(row.error)

    @property
    def end_reason(self) -> str:
        return self.row.finish or self.row.code or InternalError.code


def apply_result(worker: WorkerState, result: StepResult, ids: list[int]) -> list[Emission]:
    """Adds ``ids``, the ids of all rows, to their sequences. Rows of sequences that no longer run
    on ``worker`` are skipped."""
    emissions = []
    received: dict[Allocation, int] = {}
    start = 0
    of_prompt, of_drafts, pooled = RunKind.PROMPT, RunKind.DRAFTS, RunKind.POOLED
    for index, row in enumerate(result.rows):
        run, sequence = row.run, worker.running.get(row.slot)
        if sequence is not None and sequence.is_of(row):
            kind = run.kind
            position = sequence.num_prompt_scored if kind is of_prompt else len(sequence.emitted)
            emissions.append(Emission(sequence, index, row, position))
            if kind is of_prompt:
                sequence.add_prompt_logprobs(run)
            elif kind is of_drafts or kind is pooled:
                sequence.num_bytes += bytes_of(run)
            elif row.error is None:
                sequence.emit(run, ids[start : start + run.num_tokens])
                allocation = sequence.allocated
                received[allocation] = received.get(allocation, 0) + run.num_tokens
                allocation.num_last = run.num_tokens
            else:
                sequence.allocated.num_last = 0
        start += run.num_tokens
    for allocation, num_tokens in received.items():
        allocation.receive(num_tokens)
    return emissions
