"""Room shared between owners."""

from services.gateway.apis.responses.background import FairRoom


def filled(room: FairRoom, owner: str) -> int:
    """The owner's room, taken one by one."""
    while room.has_room(owner, 1):
        room.add(owner, 1)
    return room.held(owner)


def test_one_owner_has_a_part_and_others_find_room():
    room = FairRoom(64)
    assert [filled(room, owner) for owner in "abcdefgh"] == [64, 32, 16, 8, 4, 2, 1, 1]
    assert room.total == 128


def test_freed_room_goes_to_owners_with_less():
    room = FairRoom(4)
    assert (filled(room, "a"), filled(room, "b")) == (4, 2)
    room.add("a", -1)
    assert not room.has_room("a", 2)
    assert room.has_room("b", 1)


def test_a_whole_part_at_once_is_room_for_one():
    room = FairRoom(10)
    assert room.has_room("a", 10)
    assert not room.has_room("a", 11)
