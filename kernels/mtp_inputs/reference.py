"""Reference of ``mtp_inputs``, row by row."""

from kernels.slot_state import SlotState

Pair = tuple[int, int, tuple[int, ...]]  # id, position, place in each group


def step_row(
    state: SlotState, slot: int, start: int, num_valid: int, tokens: list[int], block_size: int,
    null_block: int,
) -> tuple[list[Pair], int, int]:  # fmt: skip
    """The pairs of one row, the place of the first one, and the first visible place."""
    first = start + 1
    if num_valid:
        if int(state.mtp_ends[slot]) != first:
            state.mtp_starts[slot] = first
        state.mtp_ends[slot] = min(first + num_valid, int(state.num_tokens[slot]))
    pairs = []
    for column, token in enumerate(tokens):
        if column < num_valid:
            row = first + column
            pairs.append((max(token, 0), row - 1, _place(state, slot, row, block_size)))
        else:
            pairs.append((0, first - 1, _nowhere(state, block_size, null_block)))
    return pairs, first, int(state.mtp_starts[slot])


def draft_row(
    state: SlotState, slot: int, block_size: int, null_block: int
) -> tuple[Pair, int, int]:
    """The same for one pair, that of the last draft."""
    num, known = int(state.num_drafts[slot]), int(state.num_tokens[slot])
    token, seen = int(state.ids[slot, num]), int(state.mtp_starts[slot])
    if not num or not state.is_open[slot]:
        return (token, known - 1, _nowhere(state, block_size, null_block)), known, seen
    row = known + num - 1
    return (token, row - 1, _place(state, slot, row, block_size)), row, seen


def target_of(state: SlotState, slot: int) -> int:
    """The position of the next draft."""
    return int(state.num_tokens[slot]) + int(state.num_drafts[slot])


def _place(state: SlotState, slot: int, row: int, block_size: int) -> tuple[int, ...]:
    blocks = state.block_tables[:, slot, row // block_size].tolist()
    return tuple(block * block_size + row % block_size for block in blocks)


def _nowhere(state: SlotState, block_size: int, null_block: int) -> tuple[int, ...]:
    return len(state.block_tables) * (null_block * block_size,)
