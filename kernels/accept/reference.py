"""Reference of ``accept``: one row at a time, without ``acceptance``."""

from torch import Tensor

from kernels.accept.output import CLOSED, FULL, RETRIED, RUNS, STOPPED
from kernels.sample import NOT_COMPILED, NOT_FINITE
from kernels.sample.slot_rules import EMITTED
from kernels.slot_state import SlotState


def accept_row(
    state: SlotState, slot: int, num_valid: int, tokens: list[int], eos_ids: Tensor
) -> tuple[int, int, int]:
    """Updates the slot; returns the number of emitted tokens, of accepted drafts, and the code."""
    state.num_drafts[slot] = 0
    if num_valid == 0:
        return 0, 0, CLOSED
    if tokens[0] == NOT_COMPILED or (tokens[0] == NOT_FINITE and num_valid > 1):
        return 0, 0, RETRIED
    if tokens[0] < 0:
        state.is_open[slot] = 0
        return 0, 0, tokens[0]
    drafts = state.ids[slot, 1:].tolist()
    emitted: list[int] = []
    code = RUNS
    for column in range(num_valid):
        token = tokens[column]
        if token < 0:
            break
        emitted.append(token)
        is_eos = token in eos_ids.tolist() and not state.ignores_eos[slot]
        if is_eos or token in state.stop_ids[slot].tolist():
            code = STOPPED
        elif int(state.num_tokens[slot]) + len(emitted) == int(state.ends[slot]):
            code = FULL
        if code != RUNS or column + 1 == num_valid or drafts[column] != token:
            break
    num_right = 0
    while num_right < num_valid - 1 and drafts[num_right] == tokens[num_right]:
        num_right += 1
    if state.rules.is_changed[slot]:
        for token in emitted:
            state.rules.seen[slot, token] += EMITTED
    state.ids[slot, 0] = emitted[-1]
    state.num_tokens[slot] += len(emitted)
    state.is_open[slot] = int(code == RUNS)
    return len(emitted), min(num_right, len(emitted)), code
