"""Images in ids, limits of sizes, and the cache of pixels."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.tokenizer.media.limits import with_detail, with_kwargs
from services.tokenizer.media.pixel_cache import PixelCache, key_of
from services.tokenizer.media.placeholders import Placeholder, ReadItem, ReadMedia, ReadMedium
from shared.errors import InvalidRequest
from shared.media.family import PixelLimits

PLACEHOLDER = 9
MOST = 1 << 20
OPTIONS = ("min_pixels", "max_pixels", "size")
LIMITS = PixelLimits(3136, 78400)


def read_image(num_tokens: int, name: int = 0, num_bytes: int = 4) -> ReadMedium:
    ids = np.full(num_tokens, PLACEHOLDER, np.int32)
    pixels = np.zeros(num_bytes, np.uint8)
    item = ReadItem(0, num_tokens, (1, 28, 28), bytes([name]) * 16, pixels)
    return ReadMedium("image", ids, (item,))


def images_of(nums: list[int]) -> ReadMedia:
    read = [read_image(num, name) for name, num in enumerate(nums)]
    return ReadMedia(read, [Placeholder(PLACEHOLDER, "<image>", "image")], 1000)


@given(st.lists(st.tuples(st.lists(st.integers(0, 8)), st.integers(1, 5))))
def test_images_are_found_where_their_placeholders_were_repeated(
    parts: list[tuple[list[int], int]],
) -> None:
    """Also side by side."""
    written = [each for texts, _ in parts for each in (*texts, PLACEHOLDER)]
    images, numbers = images_of([num for _, num in parts]), list(range(len(parts)))
    ids = images.expand(np.array(written, np.int32), numbers)
    expected = [each for texts, num in parts for each in texts + [PLACEHOLDER] * num]
    assert ids.tolist() == expected
    items = images.find_items(ids, numbers)
    assert [item.num_tokens for item in items] == [num for _, num in parts]
    assert [item.digest[0] for item in items] == numbers
    covered = [each for item in items for each in range(item.start, item.end)]
    assert covered == np.flatnonzero(ids == PLACEHOLDER).tolist()


@pytest.mark.parametrize(
    "ids", [[9, 9, 9], [9, 1, 9, 9], [9, 9, 1, 9], [9] * 5, [], [9, 9, 9, 1, 9]]
)
def test_runs_of_other_lengths_are_refused(ids: list[int]):
    with pytest.raises(InvalidRequest, match=r"expected 2 images of \[1, 3\] ids"):
        images_of([1, 3]).find_items(np.array(ids, np.int32), [0, 1])


def test_images_and_videos_may_have_one_placeholder() -> None:
    image = read_image(3)
    read = [image, image._replace(kind="video"), image]
    both = Placeholder(PLACEHOLDER, "<any>", "image"), Placeholder(PLACEHOLDER, "<any>", "video")
    media = ReadMedia(read, both, 64)
    ids = media.expand(np.array([1, PLACEHOLDER, 2, PLACEHOLDER], np.int32), [1, 2])
    assert ids.tolist() == [1, 9, 9, 9, 2, 9, 9, 9]
    assert [item.kind for item in media.find_items(ids, [1, 2])] == ["video", "image"]
    with pytest.raises(InvalidRequest, match=r"writes 2 placeholders \(<any>\) for 3 images and v"):
        media.expand(np.array([PLACEHOLDER] * 2, np.int32), [0, 1, 2])


def test_a_limit_that_is_given_alone_moves_the_other():
    for kwargs, expected in (
        ("", LIMITS),
        ("{}", LIMITS),
        ('{"max_pixels": 50000}', (3136, 50000)),
        ('{"max_pixels": 1000}', (1000, 1000)),
        ('{"min_pixels": 78400}', (78400, 78400)),
        ('{"size": {"shortest_edge": 1, "longest_edge": 2}}', (1, 2)),
        ('{"max_pixels": 5, "size": {"shortest_edge": 1, "longest_edge": 2}}', (1, 5)),
    ):
        assert with_kwargs(LIMITS, kwargs, OPTIONS)[:2] == expected[:2]
    for name in ("min_pixels", "max_pixels"):
        with pytest.raises(ValueError, match="78401 pixels; the limit is 78400"):
            with_kwargs(LIMITS, f'{{"{name}": 78401}}', OPTIONS)


def test_low_detail_is_an_area_of_512_pixels_square():
    assert with_detail(LIMITS, "low") == LIMITS._replace(has_parts=False)
    assert with_detail(PixelLimits(3136, MOST), "low")[:2] == (3136, 512 * 512)
    assert with_detail(PixelLimits(MOST, MOST), "low")[:2] == (512 * 512, 512 * 512)
    assert with_detail(PixelLimits(3136, MOST), "high")[:2] == (3136, MOST)


def test_pixels_are_shared_by_the_same_file_limits_and_salt_alone():
    file, other = np.zeros(9, np.uint8), np.ones(9, np.uint8)
    keys = [
        key_of(file, LIMITS, ""),
        key_of(other, LIMITS, ""),
        key_of(file, PixelLimits(3136, 78401), ""),
        key_of(file, LIMITS, "salt"),
    ]
    assert len(set(keys)) == 4
    assert key_of(file.copy(), LIMITS, "") == keys[0]


def test_the_cache_keeps_the_most_recently_used_entries():
    cache = PixelCache(10)
    small, large = read_image(1), read_image(1, num_bytes=11)
    for key in (b"a", b"b"):
        cache.add(key, small)
    assert cache.get(b"a") is small
    cache.add(b"c", small)
    assert [cache.get(key) for key in (b"a", b"b", b"c")] == [small, None, small]
    cache.add(b"d", large)
    assert [cache.get(key) for key in (b"a", b"c", b"d")] == [small, small, None]
