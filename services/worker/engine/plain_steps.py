"""Decode steps of sequences that want only tokens: native code runs several of them in one call."""

import numpy as np

from kernels.accept.rule import accept_rows
from kernels.cpu.decode import DecodeRows, NativeDecoder
from services.worker.backends.native import group_blocks, host_states
from services.worker.machine.state_pool import StatePool
from services.worker.slots.table import SlotTable
from services.worker.step.batch import Batch
from services.worker.step.results import NO_LOGPROBS, StepRows, result_row
from services.worker.step.sampling import random_rows_of
from services.worker.step.verify import ends_text, has_ended
from shared.wire.messages import ResultRow, StepPlan, TokenRun
from shared.wire.token_arrays import TokenArrays

ONE_TOKEN = TokenRun(1)


class PlainSteps:
    """The results equal those from the engine's other steps, bit for bit."""

    def __init__(
        self, table: SlotTable, states: StatePool, decoder: NativeDecoder, eos_ids: np.ndarray
    ) -> None:
        self._table = table
        self._states = states
        self._decoder = decoder
        self._eos_ids = eos_ids

    def may_run(self, plan: StepPlan, batch: Batch) -> bool:
        """True if ``batch``, made from ``plan``, has only decode rows without drafts, of sequences
        that want only tokens."""
        slots, num_sampling = batch.rows.slots, len(batch.rows.sampling_rows)
        is_one_each = len(batch.token_rows) == len(slots) == num_sampling
        is_of_ids = batch.embeddings is None and not plan.prefill
        return is_one_each and is_of_ids and not self._table.wants_more[slots].any()

    def run(self, batch: Batch, num_steps: int) -> tuple[StepRows, int]:
        """Runs at most ``num_steps`` steps, and none after the end of a sequence. Returns their
        rows and their number."""
        table, slots = self._table, batch.rows.slots
        num_known = batch.host_positions + 1
        context = batch.context
        rows = DecodeRows(
            input_ids=batch.input_ids,
            positions=batch.positions,
            groups=group_blocks(context),
            kv_caches=context.kv_caches,
            random=random_rows_of(table, slots, num_known, batch.positions.device),
            rooms=table.end[slots] - num_known,
            ignores_eos=table.ignore_eos[slots],
            states=host_states(context),
        )
        tokens = self._decoder.run(rows, num_steps)
        self._states.note_more(slots, len(tokens) - 1)
        ordered = batch.rows.sampling_rows
        return self._record(slots[ordered], tokens.T[ordered]), len(tokens)

    def _record(self, slots: np.ndarray, tokens: np.ndarray) -> StepRows:
        """Like ``record``, for ``tokens`` [Q, n] of n steps of ``slots`` [Q]. Only the last step
        may end a sequence."""
        table, num_before = self._table, tokens.shape[1] - 1
        last = tokens[:, num_before:]
        outcome = accept_rows(
            last,
            np.ones_like(slots),
            is_right=np.empty((len(slots), 0), bool),
            is_end=ends_text(table, slots, last, self._eos_ids),
            rooms=table.end[slots] - table.num_tokens[slots] - num_before,
        )
        table.num_computed[slots] += num_before + 1
        table.lacks_state[slots] = False
        table.append(slots, tokens, num_before + outcome.num_emitted)
        table.is_open[slots[has_ended(outcome.codes)]] = False
        rows: list[ResultRow] = []
        columns = slots, outcome.num_emitted, outcome.codes
        for slot, num_emitted, code in zip(*(each.tolist() for each in columns), strict=True):
            request, attempt = table.requests[slot]
            rows += [ResultRow(slot, request, attempt, ONE_TOKEN)] * num_before
            rows.append(result_row(table, NO_LOGPROBS, slot, 0, 0, num_emitted, 0, code))
        return rows, TokenArrays(tokens[tokens >= 0].astype(np.int32))
