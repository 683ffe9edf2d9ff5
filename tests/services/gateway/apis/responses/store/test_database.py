"""Stored responses: contents, owners and lifetimes."""

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from services.gateway.apis.responses.store.database import (
    Entry,
    ResponseDatabase,
    StoreFull,
    StoreLimits,
)
from shared.errors import ConfigError

LIMITS = StoreLimits(max_bytes=1000, max_entries=100, max_age_s=100)


@contextmanager
def opened(path: Path, limits: StoreLimits = LIMITS) -> Iterator[ResponseDatabase]:
    database = ResponseDatabase(path, limits)
    try:
        yield database
    finally:
        database.close()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "responses.db"


def entry(name: str, previous: str | None = None, owner: str = "me", num_bytes: int = 10) -> Entry:
    return Entry(name, owner, previous, b"[]", b"x" * (num_bytes - 2), [f"item-{name}"])


def names(
    database: ResponseDatabase, *asked: str, owner: str = "me", now_s: float = 0
) -> list[str]:
    return [name for name in asked if database.get(name, owner, now_s) is not None]


def outputs(
    database: ResponseDatabase, *item_ids: str, owner: str = "me", max_bytes: int = 1000
) -> list[bytes] | int:
    found = database.outputs_with(item_ids, owner, max_bytes, 0)
    return found if isinstance(found, int) else [*found]


def test_a_saved_response_returns_to_its_owner_alone(path: Path) -> None:
    with opened(path) as database:
        database.save(entry("a", owner="me"), 0)
        found = database.get("a", "me", 0)
        assert found is not None
        assert (found.input, found.response) == (b"[]", b"x" * 8)
        assert names(database, "a", "b", owner="you") == []
        assert database.conversation("a", "you", 100, 0) == "a"
        assert outputs(database, "item-a", owner="you") == []
        assert not database.delete("a", "you")
        assert outputs(database, "item-a", "item-b") == [b"x" * 8]
        assert database.delete("a", "me")
        assert names(database, "a") == []
        assert outputs(database, "item-a") == []
        assert not database.delete("a", "me")


def test_a_new_file_is_for_its_user_alone(path: Path) -> None:
    with opened(path) as database:
        database.save(entry("a"), 0)
        for each in path.parent.iterdir():
            assert each.stat().st_mode & 0o077 == 0


def test_it_is_there_when_the_file_is_opened_again(path: Path) -> None:
    with opened(path) as database:
        database.save(entry("a"), 0)
    with opened(path) as database:
        assert names(database, "a") == ["a"]


@pytest.mark.parametrize(
    "limits", [StoreLimits(1000, 3, 100), StoreLimits(30, 100, 100), StoreLimits(39, 100, 100)]
)
def test_the_most_recently_used_response_stays(path: Path, limits: StoreLimits) -> None:
    with opened(path, limits) as database:
        for now_s, name in enumerate("abc"):
            database.save(entry(name), now_s)
        assert isinstance(database.conversation("a", "me", 100, 10), list)
        database.save(entry("d"), 11)
        assert names(database, *"abcd") == ["a", "c", "d"]


def test_a_large_one_takes_the_room_of_several(path: Path) -> None:
    with opened(path, StoreLimits(50, 100, 100)) as database:
        for now_s, name in enumerate("abcd"):
            database.save(entry(name), now_s)
        database.save(entry("e", num_bytes=35), 5)
        assert names(database, *"abcde") == ["d", "e"]


def test_the_totals_match_the_stored_responses(path: Path) -> None:
    with opened(path, StoreLimits(60, 4, 100)) as database:
        for number in range(20):
            database.save(entry(f"r{number}", num_bytes=10 + number % 7), number * 10)
            if number % 3 == 0:
                database.delete(f"r{number}", "me")
            counted = database._db.execute(
                "SELECT count(*), ifnull(sum(num_bytes), 0) FROM responses"
            ).fetchone()
            totals = database._db.execute("SELECT num, num_bytes FROM totals").fetchall()
            assert totals == [counted]
            assert counted[0] <= 4
            assert counted[1] <= 60


def fill(database: ResponseDatabase, owner: str, num: int, start_s: float, **fields: Any) -> None:
    for number in range(num):
        made = entry(f"{owner}{number}", owner=owner, num_bytes=fields.get("num_bytes", 10))
        database.save(replace(made, runner=fields.get("runner")), start_s + number)


def left(database: ResponseDatabase, owner: str) -> int:
    return len(names(database, *(f"{owner}{number}" for number in range(100)), owner=owner))


@pytest.mark.parametrize("limits", [StoreLimits(100, 1000, 100), StoreLimits(10_000, 10, 100)])
def test_an_owner_displaces_its_own_responses_and_others_excess(
    path: Path, limits: StoreLimits
) -> None:
    with opened(path, limits) as database:
        fill(database, "bob", 3, 0)
        fill(database, "ann", 40, 10)
        assert (left(database, "bob"), left(database, "ann")) == (3, 7)
        assert names(database, "ann39", "ann33", owner="ann") == ["ann39", "ann33"]
        fill(database, "cat", 40, 60)
        assert (left(database, "bob"), left(database, "ann"), left(database, "cat")) == (3, 3, 4)


def test_a_large_response_pushes_out_its_owners_own(path: Path) -> None:
    with opened(path, StoreLimits(100, 1000, 100)) as database:
        fill(database, "bob", 5, 0)
        fill(database, "ann", 5, 10)
        database.save(entry("large", owner="ann", num_bytes=50), 20)
        assert (left(database, "bob"), left(database, "ann")) == (5, 0)
        with pytest.raises(StoreFull):
            database.save(entry("larger", owner="ann", num_bytes=60), 30)
        assert left(database, "bob") == 5
        assert names(database, "large", owner="ann") == ["large"]


def test_responses_in_the_making_are_not_pushed_out(path: Path) -> None:
    with opened(path, StoreLimits(100, 1000, 100)) as database:
        fill(database, "bob", 4, 0, runner="us")
        fill(database, "ann", 40, 10)
        assert (left(database, "bob"), left(database, "ann")) == (4, 6)
        database.save(entry("more", owner="bob"), 60)
        assert left(database, "ann") == 5
        with pytest.raises(StoreFull):
            database.save(entry("large", owner="bob", num_bytes=60), 70)
        assert database.wanted("us") == {"bob0", "bob1", "bob2", "bob3"}


def test_a_store_full_of_responses_in_the_making_takes_no_other(path: Path) -> None:
    with opened(path, StoreLimits(100, 1000, 100)) as database:
        fill(database, "bob", 10, 0, runner="us")
        with pytest.raises(StoreFull):
            database.save(entry("ann", owner="ann"), 20)
        assert len(database.wanted("us")) == 10


def test_a_file_from_before_the_shares_gets_them(path: Path) -> None:
    with opened(path) as database:
        fill(database, "bob", 4, 0)
        for name in ("TABLE shares", "TRIGGER share_grows", "TRIGGER share_shrinks"):
            database._db.execute(f"DROP {name}")
    with opened(path, StoreLimits(60, 1000, 100)) as database:
        fill(database, "ann", 10, 10)
        assert (left(database, "bob"), left(database, "ann")) == (3, 3)


def test_expired_responses_are_gone(path: Path) -> None:
    with opened(path) as database:
        database.save(entry("a"), 0)
        database.save(entry("b", "a"), 60)
        assert names(database, "a", "b", now_s=100) == ["a", "b"]
        assert names(database, "a", "b", now_s=101) == ["b"]
        assert database.conversation("b", "me", 100, 101) == "a"
        database.save(entry("c"), 120)
        assert names(database, "a", "b", "c", now_s=0) == ["b", "c"]


def test_a_conversation_is_all_that_a_response_follows(path: Path) -> None:
    with opened(path) as database:
        for name, previous in [("a", None), ("b", "a"), ("c", "b"), ("other", "a")]:
            database.save(entry(name, previous), 0)
        found = database.conversation("c", "me", 30, 1)
        assert [each.id for each in found if isinstance(each, Entry)] == ["a", "b", "c"]
        assert database.conversation("c", "me", 29, 1) == ""
        database.delete("a", "me")
        assert database.conversation("c", "me", 30, 1) == "a"
        assert database.conversation("fish", "me", 30, 1) == "fish"


def test_the_responses_of_items_are_read_within_a_limit_of_bytes(path: Path) -> None:
    with opened(path) as database:
        saved = entry("a", num_bytes=30)
        database.save(replace(saved, item_ids=["one", "two"]), 0)
        database.save(entry("b", num_bytes=20), 0)
        asked, both = ("one", "two", "item-b", "none"), [b"x" * 28, b"x" * 18]
        assert outputs(database, *asked, max_bytes=46) in (both, both[::-1])
        assert outputs(database, *asked, max_bytes=45) == 46


def test_two_gateways_share_a_file(path: Path) -> None:
    with opened(path) as first, opened(path) as second:
        for number in range(20):
            database = (first, second)[number % 2]
            database.save(entry(f"r{number}", f"r{number - 1}" if number else None), number)
        for database in (first, second):
            assert len(database.conversation("r19", "me", 1000, 20)) == 20
        first.delete("r19", "me")
        assert names(second, "r19") == []


def test_one_in_the_background_ends_once(path: Path) -> None:
    with opened(path) as database:
        for name in "abc":
            database.save(replace(entry(name), runner="us"), 0)
        assert (database.wanted("us"), database.wanted("them")) == ({*"abc"}, set())
        database.cancel("a")
        database.delete("b", "me")
        assert database.wanted("us") == {"c"}
        for name in "abc":
            database.finish(entry(name, num_bytes=20), 1)
            database.finish(entry(name, num_bytes=30), 2)
        found = [database.get(name, "me", 2) for name in "abc"]
        assert [each and (each.num_bytes, each.runner) for each in found] == [
            (20, None),
            None,
            (20, None),
        ]


def test_a_full_disk_fails_only_saves(path: Path) -> None:
    with opened(path, StoreLimits(1 << 30, 100, 100)) as database:
        database.save(entry("a"), 0)
        [num_pages] = database._db.execute("PRAGMA page_count").fetchone()
        database._db.execute(f"PRAGMA max_page_count = {num_pages + 1}")
        with pytest.raises(sqlite3.OperationalError, match="full"):
            database.save(entry("b", num_bytes=100_000), 1)
        assert names(database, "a", "b") == ["a"]
        database._db.execute("PRAGMA max_page_count = 1000")
        database.save(entry("b", num_bytes=100_000), 2)
        assert names(database, "a", "b") == ["a", "b"]


def no_database(path: Path) -> None:
    path.write_bytes(b"no database, but a text of some length" * 100)


def of_another_version(path: Path) -> None:
    database = sqlite3.connect(path)
    database.execute("PRAGMA user_version = 99")
    database.close()


@pytest.mark.parametrize("make", [Path.mkdir, no_database, of_another_version])
def test_a_file_that_is_none_of_ours_is_refused(path: Path, make: Callable[[Path], None]) -> None:
    make(path)
    with pytest.raises(ConfigError, match="response-store"):
        ResponseDatabase(path, LIMITS)
