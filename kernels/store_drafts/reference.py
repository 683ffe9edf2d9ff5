"""The readable truth of ``store_drafts``."""

from kernels.slot_state import SlotState


def store_draft(
    state: SlotState, slot: int, num_emitted: int, token: int, index: int, depth: int
) -> None:
    """Of one row."""
    room = int(state.ends[slot]) - int(state.num_tokens[slot]) - 1
    if token < 0 or index >= min(room, depth) or not state.is_open[slot] or not num_emitted:
        return
    if int(state.num_drafts[slot]) == index:
        state.ids[slot, 1 + index] = token
        state.num_drafts[slot] += 1
