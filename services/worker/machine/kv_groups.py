"""Groups of a model's layers. Layers of a group have the same window and share block tables; all
groups draw on one pool of equal blocks.

A block has *sections*, each with room for the tokens of one layer. The n-th layer of every group
has the n-th section: layers of different groups use the same memory, in different blocks. More
sections make larger blocks, and fewer sections more groups, each with blocks of its own.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import cycle
from typing import NamedTuple

from msgspec.structs import replace

from shared.wire.kv_groups import most_blocks
from shared.wire.messages import EVERY_LAYER, MAX_GROUPS, Capacity, Group

NEARLY = 1.05  # of the least memory: then shorter plans or blocks that come back decide


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
    length takes little memory. Layers without a window are the first group. Layers are one group,
    which keeps all tokens, if their entries differ or that takes less memory."""
    whole = LayerGroups(EVERY_LAYER, (0,) * len(layers))
    windows = [_window(layer, capacity.max_model_len) for layer in layers]
    nums_sections = range(max(1, windows.count(None)), len(layers) + 1)
    found = [_in_sections(windows, num_sections) for num_sections in nums_sections]
    sizes = {each: _size(each, capacity) for each in found if len(each.groups) <= MAX_GROUPS}
    if len({layer.entry for layer in layers}) > 1 or not any(windows) or not sizes:
        return whole
    least = min(sizes.values())
    if least > NEARLY * _size(whole, capacity):
        return whole
    small = [each for each in sizes if sizes[each] <= NEARLY * least]
    return min(small, key=lambda each: (len(each.groups), sizes[each]))


def sections_of(of_layers: Sequence[int]) -> list[int]:
    """The section of each layer, from the groups of the layers in one process."""
    nums: Counter[int] = Counter()
    sections = []
    for group in of_layers:
        sections.append(nums[group])
        nums[group] += 1
    return sections


def tokens_that_fit(capacity: Capacity, length: int) -> int:
    """Counts the tokens in the KV cache if it is full of requests of ``length`` tokens."""
    if not has_windows(capacity):
        return capacity.num_blocks * capacity.block_size
    return capacity.num_blocks * length // most_blocks(capacity, length)


def has_windows(capacity: Capacity) -> bool:
    return any(group.window is not None for group in capacity.groups)


def _window(layer: KVSpec, max_len: int) -> int | None:
    return None if layer.window is None or layer.window >= max_len else layer.window


def _in_sections(windows: Sequence[int | None], num_sections: int) -> LayerGroups:
    """Layers of a window take turns in its groups, so that each stage has layers of all."""
    nums = Counter(windows)
    groups: list[Group] = []
    turns: dict[int | None, Iterator[int]] = {}
    for window in sorted(nums, key=lambda window: (window is not None, window)):
        num_groups = -(-nums[window] // num_sections)
        turns[window] = cycle(range(len(groups), len(groups) + num_groups))
        groups += [Group(window)] * num_groups
    return LayerGroups(tuple(groups), tuple(next(turns[window]) for window in windows))


def _size(found: LayerGroups, capacity: Capacity) -> int:
    """The sections of all blocks that a request of the greatest length takes."""
    num_sections = max(Counter(found.of_layers).values())
    of_groups = replace(capacity, groups=found.groups)
    return num_sections * most_blocks(of_groups, capacity.max_model_len)
