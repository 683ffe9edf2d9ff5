"""Groups of a model's layers. Layers of a group have the same window and share block tables; all
groups draw on one pool of equal blocks.

A block has the entries of its tokens in all layers of one group, layer by layer: layers of
different groups use the same memory, in different blocks. A group has as many layers as fit, so
that layers with smaller entries are more. Larger blocks make fewer groups, each with blocks of its
own.
"""

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import cycle, pairwise
from typing import NamedTuple

from msgspec.structs import replace

from shared.wire.kv_groups import most_blocks
from shared.wire.messages import EVERY_LAYER, MAX_GROUPS, Capacity, Group

NEARLY = 1.05  # of the least memory: then shorter plans or blocks that come back decide


class KVSpec(NamedTuple):
    """A layer's ``entry`` of a token in the KV cache, or several of them, and the ``window`` of
    last tokens that the layer reads, or None for all."""

    entry: tuple[int, ...]
    window: int | None = None
    num_entries: int = 1

    @property
    def size(self) -> int:
        """The numbers of a token."""
        return self.num_entries * math.prod(self.entry)


class LayerGroups(NamedTuple):
    """``of_layers``: the index of each layer's group."""

    groups: tuple[Group, ...]
    of_layers: tuple[int, ...]


def group_layers(layers: Sequence[KVSpec], capacity: Capacity) -> LayerGroups:
    """Divides the layers of a whole model into few groups with which a request of the greatest
    length takes little memory. Layers without a window are the first group. Layers are one group,
    which keeps all tokens, if that takes less memory."""
    whole = LayerGroups(EVERY_LAYER, (0,) * len(layers))
    specs = [each._replace(window=_window(each, capacity.max_model_len)) for each in layers]
    found = [_in_blocks(specs, size) for size in _block_sizes(specs)]
    few = [each for each in found if len(each.groups) <= MAX_GROUPS]
    sizes = {each: _size(each, specs, capacity) for each in few}
    if not sizes:
        return whole
    least = min(sizes.values())
    if least > NEARLY * _size(whole, specs, capacity):
        return whole
    small = [each for each in sizes if sizes[each] <= NEARLY * least]
    return min(small, key=lambda each: (len(each.groups), sizes[each]))


class Place(NamedTuple):
    """``size`` bytes of each block, from ``start`` on in a section."""

    section: int
    start: int
    size: int


class Packed(NamedTuple):
    """The bytes of a block in each of its sections, and the place of each layer."""

    sections: list[int]
    places: list[Place]


def pack(sizes: Sequence[int], groups: Sequence[int]) -> Packed:
    """Places the layers of each group of one process, one after the other, in a block. A section
    ends where a layer ends in each group, so that layers of one size have sections for themselves,
    where their blocks are contiguous."""
    ends: Counter[int] = Counter()
    spans = []
    for size, group in zip(sizes, groups, strict=True):
        spans.append((ends[group], ends[group] + size))
        ends[group] += size
    last = max(ends.values())
    inner = {at for span in spans for at in span if not any(a < at < b for a, b in spans)}
    bounds = sorted(inner | {0, last}) if last else [0, 0]
    places = []
    for start, end in spans:
        section = min(bisect_right(bounds, start), len(bounds) - 1) - 1
        places.append(Place(section, start - bounds[section], end - start))
    return Packed([end - start for start, end in pairwise(bounds)], places)


def _window(layer: KVSpec, max_len: int) -> int | None:
    return None if layer.window is None or layer.window >= max_len else layer.window


def _block_sizes(layers: Sequence[KVSpec]) -> list[int]:
    """The numbers of a token in a block, as multiples of the entries of a kind with a window."""
    nums = Counter(layers)
    windowed = [each for each in nums if each.window is not None]
    of_whole = sum(each.size for each in layers if each.window is None)
    least = max([of_whole, *(each.size for each in windowed)])
    most = {kind.size * num for kind in windowed for num in range(1, nums[kind] + 1)}
    return sorted(size for size in most | {least} if size >= least) if windowed else []


def _in_blocks(layers: Sequence[KVSpec], size: int) -> LayerGroups:
    """Layers of a kind take turns in its groups, so that each stage has layers of all."""
    nums = Counter(layers)
    groups = [Group()] if any(each.window is None for each in layers) else []
    turns: dict[KVSpec, Iterator[int]] = {}
    for kind in sorted(nums, key=lambda each: (each.window or 0, each.entry)):
        first, num_groups = 0, 1
        if kind.window is not None:
            first, num_groups = len(groups), -(-nums[kind] // (size // kind.size))
            groups += [Group(kind.window)] * num_groups
        turns[kind] = cycle(range(first, first + num_groups))
    return LayerGroups(tuple(groups), tuple(next(turns[layer]) for layer in layers))


def _size(found: LayerGroups, layers: Sequence[KVSpec], capacity: Capacity) -> int:
    """The numbers in all blocks that a request of the greatest length takes."""
    sizes: Counter[int] = Counter()
    for group, layer in zip(found.of_layers, layers, strict=True):
        sizes[group] += layer.size
    of_groups = replace(capacity, groups=found.groups)
    return max(sizes.values()) * most_blocks(of_groups, capacity.max_model_len)
