"""Free, cached and owned blocks, and the order of eviction in a short pool."""

import pytest

from services.scheduler.block_pool import BlockPool, PrefixIndex


@pytest.fixture
def index() -> PrefixIndex:
    return PrefixIndex("w", {})


@pytest.fixture
def pool(index: PrefixIndex) -> BlockPool:
    return BlockPool(4, index)


def take(pool: BlockPool, num: int) -> list[int]:
    blocks = pool.try_allocate(num)
    assert blocks is not None
    return blocks


def test_cached_blocks_are_free_until_they_are_shared(pool: BlockPool, index: PrefixIndex):
    (block,) = take(pool, 1)
    index.add(b"a", block)
    pool.free([block])
    assert (pool.num_free, pool.num_owned, index.find(b"a")) == (4, 0, block)
    pool.share([block])
    pool.share([block])
    assert (pool.num_free, pool.num_owned, pool.ref_count(block)) == (3, 2, 2)
    assert block not in take(pool, 3)
    assert pool.try_allocate(1) is None
    pool.free([block])
    assert pool.try_allocate(1) is None, "somebody owns it still"
    pool.free([block])
    assert take(pool, 1) == [block]
    assert index.find(b"a") is None


def test_the_oldest_goes_first_and_of_one_sequence_its_last_block(
    pool: BlockPool, index: PrefixIndex
):
    old, new = take(pool, 2), take(pool, 2)
    for name, block in zip((b"0", b"1", b"2", b"3"), old + new, strict=True):
        index.add(name, block)
    pool.free(old)
    pool.free(new)
    pool.share(old[:1])
    pool.free(old[:1])
    assert [take(pool, 1)[0] for _ in range(4)] == [old[1], new[1], new[0], old[0]]


def test_blocks_that_hold_nothing_of_use_go_before_cached_ones(pool: BlockPool, index: PrefixIndex):
    first, second = take(pool, 2)
    index.add(b"a", first)
    pool.free([first, second])
    assert first not in take(pool, 3)
    assert index.find(b"a") == first


def test_a_reset_frees_cached_blocks_and_leaves_owned_ones(pool: BlockPool, index: PrefixIndex):
    cached, owned = take(pool, 2)
    index.add(b"a", cached)
    index.add(b"b", owned)
    pool.free([cached])
    pool.reset_cache()
    assert not index
    assert (pool.num_free, pool.num_owned) == (3, 1)
    pool.free([owned])
    assert sorted(take(pool, 4)) == [0, 1, 2, 3]


def test_a_block_that_nobody_owns_is_not_taken_back(pool: BlockPool, index: PrefixIndex):
    (block,) = take(pool, 1)
    index.add(b"a", block)
    pool.free([block])
    with pytest.raises(ValueError, match="twice"):
        pool.free([block])
