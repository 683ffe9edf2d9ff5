"""Reference of ``store_drafts``."""

from kernels.slot_state import SlotState


def store_draft(
    state: SlotState, slot: int, count: int, token: int, logprob: float, rank: int
) -> None:
    room = int(state.ends[slot]) - int(state.num_tokens[slot]) - 1
    num = int(state.num_drafts[slot])
    if token < 0 or num >= min(room, state.max_drafts) or not state.is_open[slot] or not count:
        return
    state.ids[slot, 1 + num] = token
    state.draft_logprobs[slot, num] = logprob
    state.draft_ranks[slot, num] = rank
    state.num_drafts[slot] += 1
