"""What the rows of a StepResult bring for their sequences. Pure."""

from dataclasses import dataclass

from services.scheduler.sequence import Sequence
from services.scheduler.worker_state import WorkerState
from shared.errors import InternalError
from shared.messages import ResultRow, StepResult
from shared.token_arrays import bytes_of


@dataclass(frozen=True, slots=True)
class Emission:
    """What row ``index`` of a StepResult brought for a sequence, after ``position`` other
    tokens of its text or, where the row is ``of_prompt``, of its prompt."""

    sequence: Sequence
    index: int
    row: ResultRow
    position: int

    @property
    def ends(self) -> bool:
        return self.row.finish is not None or self.row.error is not None

    @property
    def has_output(self) -> bool:
        """Whether its tokens are the sequence's own."""
        return not (self.row.of_prompt or self.row.of_drafts)

    @property
    def end_reason(self) -> str:
        return self.row.finish or InternalError.code


def record(worker: WorkerState, result: StepResult, ids: list[int]) -> list[Emission]:
    """Adds ``ids``, those of all rows, to their sequences. Rows of sequences that do not run on
    ``worker`` any more are left out."""
    emissions = []
    start = 0
    for index, row in enumerate(result.rows):
        sequence = worker.running.get(row.slot)
        if sequence is not None and sequence.key == (row.request, row.attempt):
            position = sequence.num_prompt_scored if row.of_prompt else len(sequence.emitted)
            emissions.append(Emission(sequence, index, row, position))
            if row.of_prompt:
                sequence.add_prompt_logprobs(row)
            elif row.of_drafts:
                sequence.num_bytes += bytes_of(row)
            elif row.error is None:
                sequence.emit(row, ids[start : start + row.num_tokens])
        start += row.num_tokens
    return emissions
