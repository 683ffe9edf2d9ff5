"""The logprobs of prompts: of what a step has computed of them, as rows of a StepResult.

They are those of the model, whatever is told of the tokens that are drawn: nothing is drawn from
them. Logits of all positions never exist at once.
"""

from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor

from kernels.logprobs import NO_LOGPROBS
from kernels.sample import NOT_FINITE
from services.worker.logprobs import LOWEST, pieces
from services.worker.results import ERRORS, ComputedRows, Part
from services.worker.sampler import Sampler
from services.worker.slots import SlotTable
from shared.messages import ALL_TOKENS, FinishReason, ResultRow
from shared.token_arrays import TokenArrays, join

LogitsOf = Callable[[Tensor], Tensor]


def tell_prompts(
    table: SlotTable,
    computed: ComputedRows,
    hidden: Tensor | None,
    logits_of: LogitsOf,
    vocab_size: int,
    sampler: Sampler,
) -> list[Part]:
    """After the step was recorded. ``hidden`` [T, hidden_size] are its states, which may be missing
    where nobody asks; ``logits_of`` makes [n, vocab_size] float32 of n of them. Sequences that end
    with their prompt are closed.
    """
    slots = computed.slots
    prompt_lens, ends = table.prompt_lens[slots], table.num_computed[slots]
    asks = table.num_prompt_logprobs[slots] != NO_LOGPROBS
    lacks = asks & (table.num_told[slots] < np.minimum(ends, prompt_lens - 1))
    is_over = (ends == prompt_lens) & (table.end[slots] == prompt_lens)
    token_ends = computed.token_ends
    parts = []
    for index in np.flatnonzero(lacks | is_over).tolist():
        slot, arrays = int(slots[index]), TokenArrays()
        if lacks[index] and hidden is not None:
            start = token_ends[index] - computed.num_tokens[index]
            states = hidden[start : token_ends[index]]
            arrays = _tell(table, slot, states, logits_of, vocab_size, sampler)
        parts.append(_part(table, slot, arrays, bool(is_over[index])))
    return parts


def _tell(
    table: SlotTable,
    slot: int,
    states: Tensor,
    logits_of: LogitsOf,
    vocab_size: int,
    sampler: Sampler,
) -> TokenArrays:
    """Of the prompt's tokens after those that ``states`` [n, hidden_size] stand for."""
    end = int(table.num_computed[slot])
    start = end - len(states)
    last = min(end, int(table.prompt_lens[slot]) - 1)
    positions = np.arange(table.num_told[slot], last)
    table.num_told[slot] = last
    asked = int(table.num_prompt_logprobs[slot])
    num_top = None if asked == ALL_TOKENS or asked >= vocab_size else asked
    ids = table.ids[slot, positions + 1]
    rows = positions - start
    return join(list(_pieces_of(states, rows, ids, num_top, logits_of, vocab_size, sampler)))


def _pieces_of(
    states: Tensor,
    rows: np.ndarray,
    ids: np.ndarray,
    num_top: int | None,
    logits_of: LogitsOf,
    vocab_size: int,
    sampler: Sampler,
) -> Iterator[TokenArrays]:
    """Of ``rows`` of ``states``, which are followed by ``ids``; both [n]."""
    for piece in pieces(np.arange(len(rows)), vocab_size):
        first, last = int(rows[piece[0]]), int(rows[piece[-1]]) + 1
        logits = logits_of(states[first:last])
        tokens = ids[piece].astype(np.int64)
        found = sampler.logprobs(logits, np.arange(len(tokens)), tokens, num_top)
        values = found.values.clamp(min=LOWEST)
        values[~logits.sum(-1).isfinite()] = torch.nan
        yield TokenArrays(
            ids[piece],
            values.flatten().cpu().numpy(),
            found.top_ids.flatten().cpu().numpy(),
            found.ranks.cpu().numpy(),
        )


def _part(table: SlotTable, slot: int, arrays: TokenArrays, is_over: bool) -> Part:
    request, attempt = table.requests[slot]
    is_wrong = bool(np.isnan(arrays.values).any())
    if is_over or is_wrong:
        table.is_open[slot] = False
    if is_wrong:
        table.num_prompt_logprobs[slot] = NO_LOGPROBS  # steps may be under way
        error = ERRORS[NOT_FINITE]
        return Part(ResultRow(slot, request, attempt, 0, error=error), TokenArrays())
    num = len(arrays.ids)
    widths = (len(arrays.values) // num, len(arrays.top_ids) // num) if num else (0, 0)
    finish: FinishReason | None = "length" if is_over else None
    return Part(ResultRow(slot, request, attempt, num, finish, None, *widths, True), arrays)
