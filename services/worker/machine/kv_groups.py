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
    """A layer's ``entry`` of a token in the KV cache, or several of them in as many sections, and
    the ``window`` of last tokens that the layer reads, or None for all."""

    entry: tuple[int, ...]
    window: int | None = None
    num_sections: int = 1


class LayerGroups(NamedTuple):
    """``of_layers``: the index of each layer's group."""

    groups: tuple[Group, ...]
    of_layers: tuple[int, ...]


def group_layers(layers: Sequence[KVSpec], capacity: Capacity) -> LayerGroups:
    """Divides the layers of a whole model into few groups with which a request of the greatest
    length takes little memory. Layers without a window are the first group. Layers are one group,
    which keeps all tokens, if their entries differ or that takes less memory."""
    whole = LayerGroups(EVERY_LAYER, (0,) * len(layers))
    specs = [each._replace(window=_window(each, capacity.max_model_len)) for each in layers]
    of_whole = sum(each.num_sections for each in specs if each.window is None)
    least_sections = max(of_whole, *(each.num_sections for each in specs))
    most_sections = sum(each.num_sections for each in specs)
    found = [_in_sections(specs, num) for num in range(least_sections, most_sections + 1)]
    few = [each for each in found if len(each.groups) <= MAX_GROUPS]
    sizes = {each: _size(each, specs, capacity) for each in few}
    has_windows = any(each.window is not None for each in specs)
    if len({each.entry for each in specs}) > 1 or not has_windows or not sizes:
        return whole
    least = min(sizes.values())
    if least > NEARLY * _size(whole, specs, capacity):
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


def _window(layer: KVSpec, max_len: int) -> int | None:
    return None if layer.window is None or layer.window >= max_len else layer.window


def _in_sections(layers: Sequence[KVSpec], num_sections: int) -> LayerGroups:
    """Layers of a kind take turns in its groups, so that each stage has layers of all."""
    nums = Counter(layers)
    groups: list[Group] = []
    turns: dict[KVSpec, Iterator[int]] = {}
    for kind in sorted(nums, key=lambda each: (each.window is not None, each.window)):
        num_groups = -(-nums[kind] // (num_sections // kind.num_sections))
        turns[kind] = cycle(range(len(groups), len(groups) + num_groups))
        groups += [Group(kind.window)] * num_groups
    return LayerGroups(tuple(groups), tuple(next(turns[layer]) for layer in layers))


def _size(found: LayerGroups, layers: Sequence[KVSpec], capacity: Capacity) -> int:
    """The sections of all blocks that a request of the greatest length takes."""
    num_sections: Counter[int] = Counter()
    for group, layer in zip(found.of_layers, layers, strict=True):
        num_sections[group] += layer.num_sections
    of_groups = replace(capacity, groups=found.groups)
    return max(num_sections.values()) * most_blocks(of_groups, capacity.max_model_len)
