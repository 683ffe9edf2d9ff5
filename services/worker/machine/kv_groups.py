"""Groups of a model's layers. Layers of a group have the same window and share block tables; all
groups draw on one pool of equal blocks.

A block has *seats*, each with room for the tokens of one layer. The n-th layer of every group has
the n-th seat: layers of different groups use the same memory, in different blocks. More seats make
larger blocks, and fewer seats more groups, each with blocks of its own.
"""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from msgspec.structs import replace

from shared.wire.kv_groups import most_blocks
from shared.wire.messages import EVERY_LAYER, MAX_GROUPS, Capacity, Group

WORTH_A_GROUP = 1.05  # times the least memory: fewer groups have shorter plans and steps


class KVSpec(NamedTuple):
    """A layer's ``entry`` of a token in the KV cache, and the ``window`` of last tokens that
    attention reads, or None for all."""

    entry: tuple[int, ...]
    window: int | None = None


class LayerGroups(NamedTuple):
    """``of_layers``: the index of each layer's group."""

    groups: tuple[Group, ...]
    of_layers: tuple[int, ...]


def group_layers(layers: Sequence[KVSpec], capacity: Capacity) -> LayerGroups:
    """Divides the layers of a whole model into few groups with which a request of the greatest
    length takes little memory. Layers without a window come first. Layers with different entries
    are one group, which keeps all tokens."""
    windows = [_window(layer, capacity.max_model_len) for layer in layers]
    found = [_in_seats(windows, num_seats) for num_seats in range(1, len(layers) + 1)]
    sizes = {each: _size(each, capacity) for each in found if len(each.groups) <= MAX_GROUPS}
    if len({layer.entry for layer in layers}) > 1 or not any(windows) or not sizes:
        return LayerGroups(EVERY_LAYER, (0,) * len(layers))
    most = WORTH_A_GROUP * min(sizes.values())
    small = [each for each in sizes if sizes[each] <= most]
    return min(small, key=lambda each: (len(each.groups), sizes[each]))


def seats_of(of_layers: Sequence[int]) -> list[int]:
    """The seat of each layer, from the groups of the layers in one process."""
    nums: Counter[int] = Counter()
    seats = []
    for group in of_layers:
        seats.append(nums[group])
        nums[group] += 1
    return seats


def tokens_that_fit(capacity: Capacity, length: int) -> int:
    """Counts the tokens in the KV cache if it is full of requests of ``length`` tokens."""
    if not has_windows(capacity):
        return capacity.num_blocks * capacity.block_size
    return capacity.num_blocks * length // most_blocks(capacity, length)


def has_windows(capacity: Capacity) -> bool:
    return any(group.window is not None for group in capacity.groups)


def _window(layer: KVSpec, max_len: int) -> int | None:
    return None if layer.window is None or layer.window >= max_len else layer.window


def _in_seats(windows: Sequence[int | None], num_seats: int) -> LayerGroups:
    """Layers of a window take turns in its groups, so that each stage has layers of all. The last
    one, for example of an MTP head, is in the first of them."""
    left = Counter(windows)
    kinds = sorted(left, key=lambda window: (window is not None, window))
    nums = {window: -(-left[window] // num_seats) for window in kinds}
    firsts = {window: sum(nums[each] for each in kinds[:at]) for at, window in enumerate(kinds)}
    of_layers = []
    for window in windows:
        left[window] -= 1
        of_layers.append(firsts[window] + left[window] % nums[window])
    groups = [Group(window) for window in kinds for _ in range(nums[window])]
    return LayerGroups(tuple(groups), tuple(of_layers))


def _size(found: LayerGroups, capacity: Capacity) -> int:
    """The seats of all blocks that a request of the greatest length takes."""
    num_seats = max(Counter(found.of_layers).values())
    of_groups = replace(capacity, groups=found.groups)
    return num_seats * most_blocks(of_groups, capacity.max_model_len)
