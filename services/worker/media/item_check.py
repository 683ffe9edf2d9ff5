"""Validates the items of admitted sequences, and the buffers of their pixels."""

from collections.abc import Sequence

from shared.errors import CodecError
from shared.media.family import WITH_ARTICLE, Family
from shared.wire.codec import Array
from shared.wire.messages import Admit, Item, MediumKind, StepPlan


def uncached_items(plan: StepPlan) -> dict[bytes, Item]:
    """By digest: the first of each different digest among items with an id to compute. The plan has
    the pixels of each, in this order."""
    found: dict[bytes, Item] = {}
    for row in plan.admit:
        for item in row.items:
            if item.end > row.num_cached:
                found.setdefault(item.digest, item)
    return found


def check_items(row: Admit, kinds: Sequence[MediumKind]) -> None:
    """Raises CodecError for items of other ``kinds``, or in other places than a prompt has."""
    end = first = 0
    for number, item in enumerate(row.items):
        if item.kind not in kinds:
            raise CodecError(
                f"slot {row.slot} has {WITH_ARTICLE[item.kind]}; this worker computes none"
            )
        if item.start < end or item.end > row.prompt_len:
            raise CodecError(
                f"slot {row.slot} has an item of the ids {item.start} to {item.end}; those from"
                f" {end} to {row.prompt_len} are free for it"
            )
        if number == 0 or not item.follows(row.items[number - 1]):
            first = item.start
        if item.time > item.start - first:  # as any later position
            raise CodecError(
                f"slot {row.slot} has an item {item.time} positions after the first ones of its"
                f" video, which it follows by {item.start - first} ids"
            )
        end = item.end


def check_pixels(plan: StepPlan, pixels: Sequence[Array]) -> None:
    """Raises CodecError if the buffers are not those of ``uncached_items``."""
    wanted = uncached_items(plan)
    found, needed = [len(each) for each in pixels], [each.num_bytes for each in wanted.values()]
    if found != needed:
        raise CodecError(f"pixels of {_some(found)} bytes; the items have {_some(needed)}")
    items = (item for row in plan.admit for item in row.items)
    if any(item.size != wanted.get(item.digest, item).size for item in items):
        raise CodecError("two items with one digest differ in size")


def num_tokens_of(item: Item, family: Family) -> int:
    """By its size; 0 for a size that no item of the kind has."""
    if (videos := family.videos) is not None:
        num_frames = videos.group if item.kind == "video" else 1
        if item.size[0] != num_frames:
            return 0
    try:
        return family.num_tokens(item.size)
    except ValueError:
        return 0


def _some(sizes: list[int]) -> str:
    return ", ".join(map(str, sizes[:5])) or "no"
