"""Adapters that take no new requests."""

import pytest
from msgspec.structs import replace

from services.scheduler.adapters import retirement as module
from services.scheduler.adapters.retirement import Retirement, conflicts
from shared.adapters.joined import join, served
from shared.wire.messages import Adapter, LoadAdapter, UnloadAdapter

OLD = Adapter(name="sql", digest="1" * 32, loaded_s=1.0)
NEW = Adapter(name="sql", digest="2" * 32, loaded_s=2.0, load="l1", path="v2")


def retired(lists: dict[str, list[Adapter]], retirement: Retirement | None = None) -> set[str]:
    marked = (retirement or Retirement()).marked(lists)
    return {
        f"{owner}{row.digest[0]}" for owner in marked for row in marked[owner] if row.is_retired
    }


def test_the_older_of_a_name_is_retired_once_the_newer_one_is_served():
    assert retired({"a": [OLD], "b": [OLD]}) == set()
    assert retired({"a": [OLD, NEW], "b": [OLD]}) == set(), "the old one has more workers"
    assert retired({"a": [OLD, NEW], "b": [OLD, NEW]}) == {"a1", "b1"}


def test_workers_with_different_bytes_under_a_name_keep_them():
    assert retired({"a": [OLD], "b": [NEW]}) == set()


def test_a_replaced_adapter_stays_retired_where_a_worker_starts_with_it_again():
    retirement = Retirement()
    assert retired({"a": [OLD, NEW], "b": [OLD, NEW]}, retirement) == {"a1", "b1"}
    restarted = replace(OLD, loaded_s=3.0)
    marked = retirement.marked({"a": [NEW], "b": [restarted]})
    assert served(join(marked.values())) == {"sql": NEW}
    other = replace(OLD, digest="3" * 32, loaded_s=3.0)
    assert retired({"a": [NEW], "b": [other]}, retirement) == set(), "these bytes are new"
    again = replace(OLD, load="l2", loaded_s=4.0)
    assert retired({"a": [NEW, again], "b": [restarted, NEW]}, retirement) == {"a2", "b2"}


def test_an_unloaded_name_is_retired_until_it_is_loaded_again():
    retirement, refused = Retirement(), replace(NEW, digest="", problem="no folder", load="l9")
    for _ in range(2):
        retirement.load(LoadAdapter("l1", "sql", "v2"))
    retirement.unload(UnloadAdapter("sql", "u1"), [OLD])
    assert retired({"a": [OLD], "b": [NEW]}, retirement) == {"a1", "b2"}, "it was being loaded"
    assert not retirement.marked({"a": [refused]})["a"][0].is_retired
    retirement.load(LoadAdapter("l2", "sql", "v2"))
    again = replace(NEW, load="l2")
    for _ in range(2):
        marked = retirement.marked({"a": [OLD, again]})
        assert served(join(marked.values())) == {"sql": again}
        retirement.unload(UnloadAdapter("sql", "u1"), [OLD, again])


def test_the_last_order_of_a_name_is_open_until_it_is_refused_or_retired():
    retirement = Retirement()
    one, two = LoadAdapter("l1", "sql", "v2"), LoadAdapter("l2", "sql", "v3")
    for order in (one, two, one):
        retirement.load(order)
    assert retirement.open_orders([NEW]) == [two]
    assert retirement.open_orders([replace(NEW, load="l2", problem="no folder")]) == []
    assert retirement.open_orders([]) == []
    three = LoadAdapter("l3", "sql", "v4")
    retirement.load(three)
    later = replace(NEW, load="l3")
    retirement.marked({"a": [OLD, later]})
    assert retirement.open_orders([]) == [three]
    retirement.marked({"a": [later, replace(OLD, load="l4", loaded_s=3.0)]})
    assert retirement.open_orders([]) == [], "a later one is served"
    retirement.load(LoadAdapter("l5", "sql", "v5"))
    retirement.unload(UnloadAdapter("sql", "u1"), [])
    assert retirement.open_orders([]) == []


def test_workers_conflict_if_one_lacks_the_served_adapter():
    three = replace(NEW, digest="3" * 32, loaded_s=3.0)
    assert conflicts([[OLD, NEW], [OLD]]) == set(), "the newer one is being loaded"
    assert conflicts([[OLD], []]) == set()
    assert conflicts([[OLD], [NEW], [three]]) == {
        ("sql", three.digest, OLD.digest),
        ("sql", three.digest, NEW.digest),
    }
    assert conflicts([[replace(OLD, is_retired=True)], [NEW]]) == set()


def test_other_names_of_the_same_bytes_stay():
    retirement, other = Retirement(), replace(OLD, name="law")
    retirement.unload(UnloadAdapter("sql", "u1"), [OLD, other])
    marked = retirement.marked({"a": [OLD, other]})
    assert [each.is_retired for each in marked["a"]] == [True, False]


def test_orders_are_remembered_in_bounded_numbers(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "MAX_LOADS", most := 64)
    retirement = Retirement()
    for number in range(2 * most):
        retirement.load(LoadAdapter(f"l{number}", f"n{number}", "v2"))
    assert len(retirement._names) == len(retirement._open) == most
    for number in range(2 * most):
        retirement.load(LoadAdapter(f"m{number}", "sql", "v2"))
    for number in range(most + 1):
        retirement.unload(UnloadAdapter("sql", f"u{number}"), [])
    assert len(retirement._names) == len(retirement._unloads) == most
    assert len(retirement._retired) == most
    assert retired({"a": [replace(NEW, load=f"m{2 * most - 1}")]}, retirement) == {"a2"}
