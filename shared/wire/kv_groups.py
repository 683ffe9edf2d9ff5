"""The blocks that a sequence needs in each group of a model's layers, and the copies of states."""

from math import lcm

from shared.wire.messages import Capacity, Group

READ_AT_ONCE = 64  # keys: attention reads, and hides, the keys from a multiple of it on
COPY_INTERVAL = 64  # ids between copies of a state, at least


def copy_interval(block_size: int) -> int:
    """The state of a sequence is copied at multiples of this number of ids, where blocks end."""
    return lcm(COPY_INTERVAL, block_size)


def num_passed(group: Group, num_computed: int, block_size: int) -> int:
    """Counts the blocks behind the window: no id after the first ``num_computed`` reads them. The
    last of these ids may be computed once more, for an MTP head."""
    if group.window is None:
        return 0
    return max(0, num_computed - group.window) // READ_AT_ONCE * READ_AT_ONCE // block_size


def most_blocks(capacity: Capacity, num_tokens: int) -> int:
    """Counts the most blocks, of all groups together, that a sequence of ``num_tokens`` owns at
    once, if it is computed alone."""
    return sum(_most_of_group(each, capacity, num_tokens) for each in capacity.groups)


def tokens_that_fit(capacity: Capacity, length: int) -> int:
    """Counts the tokens in the KV cache if it is full of requests of ``length`` tokens."""
    if not has_windows(capacity):
        return capacity.num_blocks * capacity.block_size
    return capacity.num_blocks * length // most_blocks(capacity, length)


def has_windows(capacity: Capacity) -> bool:
    return any(group.window is not None for group in capacity.groups)


def _most_of_group(group: Group, capacity: Capacity, num_tokens: int) -> int:
    size = capacity.block_size
    num_blocks = -(-num_tokens // size)
    if group.window is None:
        return num_blocks
    num_ahead = capacity.max_num_batched_tokens + 2 * capacity.num_speculative_tokens
    num_held = group.window + READ_AT_ONCE + num_ahead
    return min(num_blocks, -(-num_held // size) + 3)  # both ends are rounded to blocks
