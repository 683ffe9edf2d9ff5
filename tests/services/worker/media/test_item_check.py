"""A worker refuses plans with items that do not fit their prompts, or without their pixels."""

import numpy as np
import pytest
from msgspec.structs import replace

from services.worker.media.item_check import check_items, check_pixels
from shared.errors import CodecError
from shared.wire.messages import Admit, Capacity, Item, SamplingParams, StepPlan

TEXTS = Capacity(100, 16, 4, 512, 1024, 50)
IMAGES = Capacity(100, 16, 4, 512, 1024, 50, media=("image",))
VIDEOS = replace(IMAGES, more_media=("video",))
NUM_BYTES = 28 * 56 * 3


def item(start: int, digest: int = 1, *, num_tokens: int = 2, width: int = 56) -> Item:
    size = 1, 28, width
    return Item(start=start, num_tokens=num_tokens, size=size, digest=bytes([digest] * 16))


def check(
    items: list[Item],
    num_bytes: list[int],
    *,
    num_cached: int = 0,
    capacity: Capacity = IMAGES,
) -> None:
    """A plan of two equal sequences with a prompt of 40 ids, then 5 ids."""
    blocks = [0, 1, 2]
    rows = [
        Admit(slot, "r", 1, 0, 0, 40, 45, num_cached, SamplingParams(seed=0), blocks, items=items)
        for slot in range(2)
    ]
    plan = StepPlan(1, [], rows, [], [], [])
    pixels = [np.zeros(num, np.uint8) for num in num_bytes]
    check_pixels(plan, pixels)
    for row in rows:
        check_items(row, (*capacity.media, *capacity.more_media))


@pytest.mark.parametrize(
    ("items", "num_cached", "num_bytes"),
    [
        ([], 0, []),
        ([item(0), item(2), item(38)], 0, [NUM_BYTES]),
        ([item(0, 1), item(20, 2)], 0, [NUM_BYTES, NUM_BYTES]),
        ([item(0, 1), item(20, 2)], 2, [NUM_BYTES]),  # the first one is cached
        ([item(0, 1), item(20, 2)], 21, [NUM_BYTES]),  # and half of the second one
        ([item(0, 1), item(20, 1)], 30, []),
    ],
)
def test_different_items_with_ids_to_compute_have_pixels(
    items: list[Item], num_cached: int, num_bytes: list[int]
) -> None:
    check(items, num_bytes, num_cached=num_cached)
    for wrong in ([*num_bytes, NUM_BYTES], [*num_bytes[1:], NUM_BYTES - 3], [*num_bytes, 0]):
        with pytest.raises(CodecError, match="the items have"):
            check(items, wrong, num_cached=num_cached)


@pytest.mark.parametrize(
    "items", [[item(4), item(5)], [item(8), item(0)], [item(39)], [item(41)], [item(0), item(0)]]
)
def test_items_have_places_of_their_own_in_the_prompt(items: list[Item]) -> None:
    with pytest.raises(CodecError, match="are free for it"):
        check(items, [NUM_BYTES])


def test_one_digest_has_one_size() -> None:
    with pytest.raises(CodecError, match="differ in size"):
        check([item(0), item(8, width=28)], [NUM_BYTES])


def frames(start: int, time: int) -> Item:
    return replace(item(start, start), kind="video", time=time)


def test_no_time_is_above_the_number_of_ids_before_it_in_its_video() -> None:
    """So that no position is above its index."""
    good = [frames(4, 0), frames(6, 2), frames(8, 4), frames(11, 0), frames(13, 1)]
    check(good, 5 * [NUM_BYTES], capacity=VIDEOS)
    with pytest.raises(CodecError, match="has a video; this worker computes none"):
        check(good, 5 * [NUM_BYTES])
    for wrong in (
        [frames(4, 1)],
        [frames(4, 0), frames(6, 3)],
        [frames(4, 0), frames(7, 1)],
        [item(4, 4), frames(6, 1)],
        [frames(4, 0), replace(item(6, 6), time=1)],
    ):
        with pytest.raises(CodecError, match="positions after the first ones of its video"):
            check(wrong, len(wrong) * [NUM_BYTES], capacity=VIDEOS)


def test_a_worker_without_images_takes_none() -> None:
    with pytest.raises(CodecError, match="has an image; this worker computes none"):
        check([item(0)], [NUM_BYTES], capacity=TEXTS)
    with pytest.raises(CodecError, match="the items have no"):
        check([], [NUM_BYTES], capacity=TEXTS)
