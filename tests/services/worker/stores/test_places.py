"""The files of a store: the claims a reader believes, and the parts that survive."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.worker.stores.files import OtherStores
from services.worker.stores.folder import (
    BLOCKS,
    FORMAT,
    HEADER,
    RECORDS,
    Header,
    Part,
    read_header,
    write_header,
)
from services.worker.stores.places import RECORD_BYTES, BlockLost, OwnPlaces, Places
from tests.services.worker.stores.worker import key_of

SIZE, NUM = 96, 8


def header(layout: str = "layout", place_bytes: int = SIZE, state_bytes: int = 0) -> Header:
    return Header(FORMAT, layout, "s", NUM, place_bytes, int(state_bytes > 0), state_bytes)


def part(num_places: int = NUM) -> Part:
    return Part(BLOCKS, RECORDS, num_places, SIZE)


def block(number: int) -> list[memoryview]:
    """In two pieces."""
    whole = memoryview(bytearray([number + 1] * SIZE))
    return [whole[:32], whole[32:]]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "0").mkdir()
    return tmp_path / "0"


@pytest.fixture
def own(folder: Path) -> Iterator[OwnPlaces]:
    """Places 0 to 3 have the blocks of their numbers."""
    own = OwnPlaces(folder, part())
    write_header(folder, header())
    for place in range(4):
        own.save(place, key_of(place), block(place))
    yield own
    own.close()


def read(places: Places, place: int, key: int | None = None) -> bytes:
    found = block(-1)
    places.load(place, key_of(place if key is None else key), found)
    return b"".join(found)


def why_lost(places: Places, place: int, key: int | None = None) -> str:
    with pytest.raises(BlockLost) as lost:
        read(places, place, key)
    return str(lost.value)


def change(path: Path, offset: int, data: bytes) -> None:
    with path.open("r+b") as stream:
        stream.seek(offset)
        stream.write(data)


def test_a_block_is_read_under_its_own_key_alone(own: OwnPlaces) -> None:
    assert read(own, 2) == bytes([3] * SIZE)
    assert why_lost(own, 2, key=3) == "other"
    assert why_lost(own, 5) == "other"
    assert why_lost(own, NUM + 100) == "other"
    own.forget(2)
    own.forget(2)
    assert why_lost(own, 2) == "other"


def test_a_place_has_the_block_saved_last(own: OwnPlaces) -> None:
    own.save(1, key_of(9), block(9))
    assert read(own, 1, key=9) == bytes([10] * SIZE)
    assert why_lost(own, 1) == "other"
    assert list(own.keys) == [0, 2, 3, 1]


@pytest.mark.parametrize("byte", range(0, SIZE, 5))
def test_a_flipped_bit_loses_its_block(own: OwnPlaces, folder: Path, byte: int) -> None:
    change(folder / BLOCKS, 2 * SIZE + byte, b"\x07")
    assert why_lost(own, 2) == "damaged"
    assert read(own, 1)
    assert read(own, 3)


@pytest.mark.parametrize("byte", [0, 15, 16, 23, 24, 27, 28, 31])
def test_a_damaged_record_is_a_free_place(own: OwnPlaces, folder: Path, byte: int) -> None:
    """Also for the next owner."""
    change(folder / RECORDS, 2 * RECORD_BYTES + byte, b"\xee")
    assert why_lost(own, 2) == "other"
    again = OwnPlaces(folder, part())
    assert again.keys == {place: key_of(place) for place in (0, 1, 3)}
    again.close()


def test_a_kill_between_place_and_record_loses_one_block(
    own: OwnPlaces, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the old nor the new block is believed."""
    write = own._write_record

    def die(place: int, record: bytes) -> None:
        if any(record):
            raise KeyboardInterrupt
        write(place, record)

    monkeypatch.setattr(own, "_write_record", die)
    with pytest.raises(KeyboardInterrupt):
        own.save(2, key_of(9), block(9))
    again = OwnPlaces(folder, part())
    assert why_lost(again, 2) == why_lost(again, 2, key=9) == "other"
    assert again.keys == {place: key_of(place) for place in (0, 1, 3)}
    again.close()


def test_a_cut_file_loses_its_end(own: OwnPlaces, folder: Path) -> None:
    os.truncate(folder / BLOCKS, 2 * SIZE + 10)
    assert read(own, 1)
    assert why_lost(own, 2) == "damaged"
    assert why_lost(own, 3) == "damaged"


def test_the_next_owner_has_the_order_of_saving(own: OwnPlaces, folder: Path) -> None:
    own.save(1, key_of(9), block(9))
    again = OwnPlaces(folder, part())
    assert list(again.keys.items()) == [
        (0, key_of(0)),
        (2, key_of(2)),
        (3, key_of(3)),
        (1, key_of(9)),
    ]
    again.save(0, key_of(10), block(10))
    again.close()
    last = OwnPlaces(folder, part())
    assert list(last.keys) == [2, 3, 1, 0]
    last.close()


@pytest.mark.parametrize("num_places", [2, 3, 20])
def test_a_store_of_another_size_keeps_the_blocks_that_fit(
    own: OwnPlaces, folder: Path, num_places: int
) -> None:
    own.close()
    again = OwnPlaces(folder, part(num_places))
    assert list(again.keys) == list(range(min(4, num_places)))
    assert read(again, 1) == bytes([2] * SIZE)
    assert (folder / BLOCKS).stat().st_size == num_places * SIZE
    again.close()
    back = OwnPlaces(folder, part())
    assert list(back.keys) == list(range(min(4, num_places)))
    own._blocks, own._records = os.open(folder / BLOCKS, 0), os.open(folder / RECORDS, 0)
    back.close()


def test_the_files_are_of_this_user_alone(own: OwnPlaces, folder: Path) -> None:
    modes = {path.name: path.stat().st_mode & 0o077 for path in folder.iterdir()}
    assert modes[BLOCKS] == modes[RECORDS] == 0


def test_other_stores_are_found_by_their_ids(own: OwnPlaces, folder: Path) -> None:
    others = OtherStores(folder.parent, header())
    found = others.find("s")
    assert found is not None
    (places,) = found.parts
    assert read(places, 2) == bytes([3] * SIZE)
    own.save(5, key_of(5), block(5))
    assert read(places, 5) == bytes([6] * SIZE)
    assert others.find("t") is None
    assert OtherStores(folder.parent, header(state_bytes=SIZE)).find("s") is None
    assert OtherStores(folder.parent, header("other")).find("s") is None
    assert OtherStores(folder.parent, header(place_bytes=SIZE + 1)).find("s") is None


def test_a_removed_store_is_not_found_again(own: OwnPlaces, folder: Path) -> None:
    others = OtherStores(folder.parent, header())
    assert others.find("s") is not None
    for path in folder.iterdir():
        path.unlink()
    assert own.is_removed
    assert others.find("s") is None


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b'{"format": 1}', b"\xff" * 9000])
def test_a_bad_header_is_none(folder: Path, text: bytes) -> None:
    (folder / HEADER).write_bytes(text)
    assert read_header(folder) is None


def test_links_are_not_followed(own: OwnPlaces, folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "1"
    other.mkdir()
    for name in (BLOCKS, RECORDS, HEADER):
        (other / name).symlink_to(folder / name)
    assert read_header(other) is None
    with pytest.raises(OSError, match="symbolic links"):
        Places(other, part())
