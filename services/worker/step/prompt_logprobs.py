"""Computes the logprobs of prompts, of the chunks that a step computes, as rows of a StepResult.

They are those of the model, also where those of sampled tokens are processed: nothing is sampled
from them. Logits of all positions never exist at once.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kernels.logprobs.num_logprobs import NO_LOGPROBS
from kernels.logprobs.row_logprobs import RowLogprobs
from kernels.sample import NOT_FINITE
from services.worker.machine.streams import Download
from services.worker.slots.table import SlotTable
from services.worker.step.logprobs import num_top_of, pieces
from services.worker.step.results import ERRORS, ComputedRows, RowPart
from shared.wire.messages import (
    MIN_LOGPROB,
    NO_TOKENS,
    FinishReason,
    ResultRow,
    RunKind,
    TokenRun,
)
from shared.wire.token_arrays import TokenArrays, join

LogitsOf = Callable[[Tensor], Tensor]  # [n, hidden_size] → [n, V] float32
# logits [n, V], tokens [n] int64, and how many of the likeliest are wanted; None: all.
Score = Callable[[Tensor, np.ndarray, int | None], RowLogprobs]


@dataclass(frozen=True, slots=True)
class PromptPart:
    """Logprobs of the tokens ``ids`` [n] of a prompt, on their way to the host. The last one is
    number ``last``, counted from the prompt's second."""

    ids: np.ndarray
    last: int
    downloads: list[Download]  # values, top ids and ranks, in pieces

    def arrays(self) -> TokenArrays:
        """Waits until they are there."""
        start, found = 0, []
        for download in self.downloads:
            values, top_ids, ranks = download.wait()
            ids = self.ids[start : start + len(ranks)]
            found.append(TokenArrays(ids, values.ravel(), top_ids.ravel(), ranks))
            start += len(ranks)
        return join(found)


def ask_prompts(
    table: SlotTable,
    slots: np.ndarray,
    starts: np.ndarray,
    nums: np.ndarray,
    hidden: Tensor,
    vocab_size: int,
    logits_of: LogitsOf,
    score: Score,
) -> dict[int, PromptPart]:
    """Starts the logprobs of every chunk whose request asks for them, and returns them by slot.
    Each of ``slots`` [C] has ``nums`` [C] states of ``hidden`` [T, hidden_size], from position
    ``starts`` [C] on."""
    asked = table.num_prompt_logprobs[slots]
    if (asked == NO_LOGPROBS).all():
        return {}
    ends, prompt_lens = starts + nums, table.prompt_lens[slots]
    # Tokens before a chunk were scored by the chunks before it, whose results may be under way.
    firsts = np.maximum(table.num_prompt_scored[slots], starts)
    lasts = np.minimum(ends, prompt_lens - 1)
    rows = np.cumsum(nums) - nums
    nums_top = num_top_of(asked, vocab_size)
    found = {}
    for index in np.flatnonzero((asked != NO_LOGPROBS) & (firsts < lasts)).tolist():
        slot, offset = int(slots[index]), rows[index] - starts[index]
        states = hidden[firsts[index] + offset : lasts[index] + offset]
        ids = table.ids[slot, firsts[index] + 1 : lasts[index] + 1].copy()
        scored = _pieces_of(states, ids, int(nums_top[index]), vocab_size, logits_of, score)
        if nums_top[index] < vocab_size:  # little, so that one copy takes all
            columns = zip(*scored, strict=True)
            downloads = [Download(*(torch.cat(each) for each in columns))]
        else:
            downloads = [Download(*each) for each in scored]
        found[slot] = PromptPart(ids, int(lasts[index]), downloads)
    return found


def _pieces_of(
    states: Tensor,
    ids: np.ndarray,
    num_top: int,
    vocab_size: int,
    logits_of: LogitsOf,
    score: Score,
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yields values, top ids and ranks, in pieces, for ``states`` [n, hidden_size], which are
    followed by ``ids`` [n]."""
    for piece in pieces(np.arange(len(ids)), vocab_size):
        logits = logits_of(states[piece[0] : piece[-1] + 1])
        tokens = ids[piece].astype(np.int64)
        found = score(logits, tokens, num_top if num_top < vocab_size else None)
        is_finite = logits.sum(-1, keepdim=True).isfinite()
        values = torch.where(is_finite, found.values.clamp(min=MIN_LOGPROB), torch.nan)
        yield values, found.top_ids, found.ranks


def prompt_rows(
    table: SlotTable, computed: ComputedRows, parts: Mapping[int, PromptPart]
) -> list[RowPart]:
    """Returns the rows of prompts, once the step is recorded, and closes sequences that end with
    their prompt."""
    slots = computed.slots
    prompt_lens, ends = table.prompt_lens[slots], table.num_computed[slots]
    is_over = (ends == prompt_lens) & (table.end[slots] == prompt_lens)
    parts_out = []
    for slot, over in zip(slots.tolist(), is_over.tolist(), strict=True):
        arrays = TokenArrays()
        if slot in parts and table.num_prompt_logprobs[slot] != NO_LOGPROBS:
            arrays = parts[slot].arrays()
            table.num_prompt_scored[slot] = parts[slot].last
        elif not over:
            continue
        parts_out.append(_part(table, slot, arrays, over))
    return parts_out


def _part(table: SlotTable, slot: int, arrays: TokenArrays, is_over: bool) -> RowPart:
    request, attempt = table.requests[slot]
    is_wrong = bool(np.isnan(arrays.values).any())
    if is_over or is_wrong:
        table.is_open[slot] = False
    if is_wrong:
        table.num_prompt_logprobs[slot] = NO_LOGPROBS  # steps may be under way
        error = ERRORS[NOT_FINITE]
        return RowPart(ResultRow(slot, request, attempt, NO_TOKENS, error=error), TokenArrays())
    num = len(arrays.ids)
    widths = (len(arrays.values) // num, len(arrays.top_ids) // num) if num else (0, 0)
    finish: FinishReason | None = "length" if is_over else None
    run = TokenRun(num, *widths, kind=RunKind.PROMPT)
    return RowPart(ResultRow(slot, request, attempt, run, finish), arrays)
