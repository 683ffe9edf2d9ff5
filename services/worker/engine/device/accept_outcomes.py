"""What a step decided, when it comes to the host."""

from dataclasses import dataclass

import numpy as np

from kernels.accept.output import CLOSED, CODE, NUM_ACCEPTED, NUM_EMITTED, NUM_VALID, TOKENS
from services.worker.engine.device.planned_rows import PlannedRows
from services.worker.slots.table import SlotTable
from services.worker.step.verify import NO_TOKEN, AcceptOutcome

NO_ROWS = np.zeros((0, TOKENS + 1), np.int32)


@dataclass(frozen=True, slots=True)
class StepRows:
    """R rows of a step as results want them, see ``Batch``."""

    slots: np.ndarray  # [R] int64
    num_tokens: np.ndarray  # [R] int64
    num_drafts: np.ndarray  # [R] int64
    num_recomputed: np.ndarray  # [R] int64
    sampling_rows: np.ndarray  # [Q] int64, indices into R

    @classmethod
    def of_chunks(cls, planned: PlannedRows) -> "StepRows":
        """Those alone."""
        zeros = np.zeros_like(planned.chunk_nums)
        rows = planned.chunk_slots, planned.chunk_nums, zeros, planned.num_recomputed
        return cls(*rows, planned.sampling_chunks)

    @property
    def sampling_slots(self) -> np.ndarray:
        slots: np.ndarray = self.slots[self.sampling_rows]
        return slots

    @property
    def token_ends(self) -> np.ndarray:
        ends: np.ndarray = np.cumsum(self.num_tokens)
        return ends


def unpack(
    table: SlotTable, planned: PlannedRows, packed: np.ndarray
) -> tuple[StepRows, AcceptOutcome]:
    """``packed`` [B + P, 3 + 2 w] int32 is of the rows that sample: those that decode, then those
    of chunks. Rows whose slots closed meanwhile are left out.

    Those that sample are ordered by (route, slot); ``rows`` of the outcome count the step's logits.
    """
    slots = planned.slots
    kept = np.flatnonzero((packed[:, CODE] != CLOSED) & table.is_open[slots])
    kept = kept[np.lexsort((slots[kept], table.routes[slots[kept]]))]
    chunks = np.flatnonzero(table.is_open[planned.chunk_slots])
    return _rows(planned, packed, kept, chunks), _outcome(packed, kept)


def _rows(
    planned: PlannedRows, packed: np.ndarray, kept: np.ndarray, chunks: np.ndarray
) -> StepRows:
    """Those of ``packed`` that are ``kept``, and those ``chunks``, behind the rows that decode."""
    num_decoding = len(planned.decode_slots)
    decoding = kept[kept < num_decoding]
    num_valid = packed[decoding, NUM_VALID].astype(np.int64)
    where = np.zeros(len(packed), np.int64)
    where[decoding] = np.arange(len(decoding))
    where[num_decoding:] = len(decoding) + np.searchsorted(chunks, planned.sampling_chunks)
    return StepRows(
        np.concatenate([planned.decode_slots[decoding], planned.chunk_slots[chunks]]),
        np.concatenate([num_valid, planned.chunk_nums[chunks]]),
        np.concatenate([num_valid - 1, np.zeros_like(chunks)]),
        np.concatenate([np.zeros_like(num_valid), planned.num_recomputed[chunks]]),
        where[kept],
    )


def _outcome(packed: np.ndarray, kept: np.ndarray) -> AcceptOutcome:
    width = (packed.shape[1] - TOKENS + 1) // 2
    numbers = packed[kept].astype(np.int64)
    tokens, drafts = numbers[:, TOKENS : TOKENS + width], numbers[:, TOKENS + width :]
    columns = np.arange(width)
    num_emitted = numbers[:, NUM_EMITTED]
    is_emitted = columns < num_emitted[:, None]
    is_draft = columns[:-1] < numbers[:, NUM_VALID, None] - 1
    return AcceptOutcome(
        tokens=tokens,
        drafts=np.where(is_draft, drafts, NO_TOKEN),
        num_emitted=num_emitted,
        num_accepted=numbers[:, NUM_ACCEPTED],
        codes=numbers[:, CODE],
        emitted=tokens[is_emitted],
        rows=(kept[:, None] * width + columns)[is_emitted],
    )
