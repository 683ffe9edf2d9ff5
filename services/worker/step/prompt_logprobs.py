"""Computes the logprobs of a step's prompt chunks, as rows of a StepResult.

Prompt logprobs are always raw, even if a worker returns processed logprobs for sampled tokens.
Their logits are computed in pieces, never for all positions at once.
"""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from kernels.logprobs.num_logprobs import NO_LOGPROBS
from kernels.sample import NOT_FINITE
from services.worker.machine.streams import Fetched
from services.worker.models import CausalLM
from services.worker.slots.table import SlotTable
from services.worker.step.logprobs import num_top_of, pieces_of
from services.worker.step.results import ERRORS, RowPart
from services.worker.step.step import Backend, PendingResult, Step, StepPart
from shared.wire.messages import (
    MIN_LOGPROB,
    NO_TOKENS,
    FinishReason,
    ResultRow,
    RunKind,
    TokenRun,
)
from shared.wire.token_arrays import TokenArrays, join


class _Chunk(NamedTuple):
    """A chunk's part of the result: logprobs of its tokens ``ids`` [n], if requested, and the end
    of a sequence without output."""

    slot: int
    is_over: bool
    ids: np.ndarray
    last: int  # scored tokens of the prompt, this chunk included
    pieces: list[Fetched]  # values, top ids and ranks

    def arrays(self) -> TokenArrays:
        """Waits for the logprobs."""
        start, found = 0, []
        for piece in self.pieces:
            values, top_ids, ranks = piece.wait()
            ids = self.ids[start : start + len(ranks)]
            found.append(TokenArrays(ids, values.ravel(), top_ids.ravel(), ranks))
            start += len(ranks)
        return join(found)


class PromptLogprobs(StepPart[list[_Chunk]]):
    def __init__(self, table: SlotTable, backend: Backend, model: CausalLM) -> None:
        self._table = table
        self._backend = backend
        self._model = model

    def after_sampling(self, step: Step) -> list[_Chunk] | None:
        if not step.rows.has_chunks:
            return None
        table, chunks = self._table, step.rows.chunks
        slots, prompt_lens = chunks.slots, table.prompt_lens[chunks.slots]
        asks = table.num_prompt_logprobs[slots] != NO_LOGPROBS
        is_over = (chunks.ends == prompt_lens) & (table.end[slots] == prompt_lens)
        if not (asks | is_over).any():
            return None
        # Earlier chunks have scored the tokens before this one; their results may be in flight.
        firsts = np.maximum(table.num_prompt_scored[slots], chunks.starts)
        lasts = np.minimum(chunks.ends, prompt_lens - 1)
        asks &= firsts < lasts
        offsets = chunks.token_ends - chunks.ends
        found = []
        for row in np.flatnonzero(asks | is_over).tolist():
            slot, first, last = int(slots[row]), int(firsts[row]), int(lasts[row])
            ids, pieces = table.ids[slot, first + 1 : last + 1].copy(), []
            if asks[row]:
                hidden, offset = step.computation.chunk_states(), offsets[row]
                pieces = self._score(slot, hidden[first + offset : last + offset], ids)
            found.append(_Chunk(slot, bool(is_over[row]), ids, last, pieces))
        return found

    def rows_of(self, result: PendingResult, note: list[_Chunk]) -> list[RowPart]:
        """Also closes sequences that end with their prompt."""
        table, parts = self._table, []
        for chunk in note:
            arrays = TokenArrays()
            if chunk.pieces and table.num_prompt_logprobs[chunk.slot] != NO_LOGPROBS:
                arrays = chunk.arrays()
                table.num_prompt_scored[chunk.slot] = chunk.last
            elif not chunk.is_over:
                continue
            parts.append(_part(table, chunk.slot, arrays, chunk.is_over))
        return parts

    def _score(self, slot: int, states: Tensor, ids: np.ndarray) -> list[Fetched]:
        """Fetches the logprobs of ``ids`` [n], the ids that follow ``states`` [n, hidden_size]."""
        num_top = int(num_top_of(self._table.num_prompt_logprobs[slot], self._table.vocab_size))
        is_narrow = num_top < self._table.vocab_size
        wanted = num_top if is_narrow else None
        pieces = pieces_of(np.arange(len(ids)), self._table.vocab_size)
        scored: Iterable[tuple[Tensor, ...]] = (
            self._score_piece(slot, states[piece[0] : piece[-1] + 1], ids[piece], wanted)
            for piece in pieces
        )
        if is_narrow:  # few values, so one copy takes all pieces
            scored = [tuple(torch.cat(each) for each in zip(*scored, strict=True))]
        return [self._backend.fetch(*each) for each in scored]

    def _score_piece(
        self, slot: int, states: Tensor, ids: np.ndarray, num_top: int | None
    ) -> tuple[Tensor, ...]:
        """Returns values, top ids and ranks; rows of non-finite logits have NaN values."""
        logits = self._model.logits_of(np.full(len(ids), slot), states)
        tokens = self._backend.upload(ids.astype(np.int64))
        found = self._backend.sampler.logprobs(logits, tokens, num_top)
        is_finite = logits.sum(-1, keepdim=True).isfinite()
        values = torch.where(is_finite, found.values.clamp(min=MIN_LOGPROB), torch.nan)
        return values, found.top_ids, found.ranks


def _part(table: SlotTable, slot: int, arrays: TokenArrays, is_over: bool) -> RowPart:
    request, attempt = table.requests[slot]
    is_wrong = bool(np.isnan(arrays.values).any())
    if is_over or is_wrong:
        table.is_open[slot] = False
    if is_wrong:
        table.num_prompt_logprobs[slot] = NO_LOGPROBS  # later steps may be in flight
        error = ERRORS[NOT_FINITE]
        return RowPart(ResultRow(slot, request, attempt, NO_TOKENS, error=error), TokenArrays())
    num = len(arrays.ids)
    widths = (len(arrays.values) // num, len(arrays.top_ids) // num) if num else (0, 0)
    finish: FinishReason | None = "length" if is_over else None
    run = TokenRun(num, *widths, kind=RunKind.PROMPT)
    return RowPart(ResultRow(slot, request, attempt, run, finish), arrays)
