"""Lists of adapters of several workers."""

from hypothesis import given
from hypothesis import strategies as st
from msgspec.msgpack import encode
from msgspec.structs import replace

from shared.adapters.joined import MAX_LIST_BYTES, digests, join, served
from shared.wire.messages import MAX_ADAPTERS, Adapter

ONE, TWO = "1" * 32, "2" * 32
FIRST = Adapter(name="sql", digest=ONE, rank=8, loaded_s=1.0)
NEWER = Adapter(name="sql", digest=TWO, rank=8, loaded_s=2.0, load="l2", path="v2")
REFUSED = Adapter(name="sql", load="l3", problem="no such folder")

ROWS = st.builds(
    Adapter,
    name=st.sampled_from(["a", "b"]),
    digest=st.sampled_from([ONE, TWO]),
    loaded_s=st.sampled_from([1.0, 2.0]),
    load=st.sampled_from(["", "l1", "l2"]),
    problem=st.sampled_from(["", "", "bad"]),
    is_retired=st.booleans(),
)


def test_workers_of_one_name_and_digest_are_one_row_as_of_the_latest():
    again = replace(FIRST, loaded_s=3.0, load="l1", path="sql", num_workers=2)
    assert join([[FIRST], [again]]) == [replace(again, num_workers=3)]


def test_refusals_are_told_apart_by_their_loads():
    other = replace(REFUSED, load="l4")
    assert join([[REFUSED], [REFUSED, other]]) == [replace(REFUSED, num_workers=2), other]


@given(st.lists(st.lists(ROWS, max_size=4), max_size=4))
def test_the_order_of_lists_is_of_no_account_and_joined_lists_can_be_joined(
    lists: list[list[Adapter]],
):
    whole = join(lists)
    assert join(lists[::-1]) == whole
    assert join([join(lists[:2]), join(lists[2:])]) == whole
    workers = sum(each.num_workers for rows in lists for each in rows)
    assert sum(each.num_workers for each in whole) == workers


def test_a_name_stands_for_the_adapter_of_most_workers_then_for_the_latest():
    assert served([FIRST, NEWER]) == {"sql": NEWER}
    both = replace(FIRST, num_workers=2)
    assert served([both, NEWER]) == {"sql": both}
    assert served([REFUSED, replace(FIRST, is_retired=True)]) == {}


def test_open_requests_may_have_retired_adapters():
    assert digests([replace(FIRST, is_retired=True), NEWER, REFUSED]) == {ONE, TWO}


def test_a_list_that_is_too_long_for_a_message_loses_refusals_first():
    name, good = "x" * 256, [replace(FIRST, name=f"{number:04}") for number in range(MAX_ADAPTERS)]
    long = replace(REFUSED, name=name, problem="p" * 4000)
    bad = [replace(long, load=f"{number:04}") for number in range(900)]
    joined = join([bad, good])
    assert joined[:MAX_ADAPTERS] == good
    assert MAX_ADAPTERS < len(joined) < MAX_ADAPTERS + len(bad)
    assert len(encode(joined)) <= MAX_LIST_BYTES + 5
    many = [replace(FIRST, name=f"{number:04}") for number in range(3 * MAX_ADAPTERS)]
    assert join([many]) == many[: 2 * MAX_ADAPTERS]
