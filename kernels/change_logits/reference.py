"""Reference of ``change_logits``: one row, token by token, in float64."""

import numpy as np

from kernels.sample.slot_rules import EMITTED, IN_PROMPT, IS_END
from kernels.slot_state import SlotState


def changed_row(logits: np.ndarray, state: SlotState, slot: int, position: int) -> np.ndarray:
    """logits [V] → [V]"""
    rules = state.rules
    num_before = min(position - int(state.num_tokens[slot]), state.max_drafts)
    drafts = state.ids[slot, 1 : 1 + max(0, num_before)].tolist()
    changed = logits.astype(np.float64)
    for token in range(len(changed)):
        seen = int(rules.seen[slot, token])
        num_emitted = seen // EMITTED + drafts.count(token)
        changed[token] += float(rules.biases[slot, token])
        if seen & IS_END and position < int(rules.min_ends[slot]):
            changed[token] = -np.inf
        if seen & IN_PROMPT or num_emitted:
            penalty = float(rules.repetition_penalty[slot])
            changed[token] *= 1 / penalty if changed[token] > 0 else penalty
        if num_emitted:
            changed[token] -= float(rules.presence_penalty[slot])
            changed[token] -= float(rules.frequency_penalty[slot]) * num_emitted
    return changed
