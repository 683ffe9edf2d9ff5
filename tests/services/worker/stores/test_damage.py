"""Flipped bits and torn writes: each is found, and no byte of a damaged place is used."""

import os
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from services.worker.stores.folder import BLOCKS, RECORDS, Part
from services.worker.stores.places import RECORD_BYTES, BlockLost, OwnPlaces
from tests.services.worker.stores.worker import key_of

NUM_PLACES, PLACE_BYTES = 8, 512
PART = Part(BLOCKS, RECORDS, NUM_PLACES, PLACE_BYTES)


class DamagedStore:
    """Each place has its number as its key, and the bytes of its last save."""

    def __init__(self, folder: Path, random: Random) -> None:
        self.folder, self.random = folder, random
        self.places = OwnPlaces(folder, PART)
        self.contents = [random.randbytes(PLACE_BYTES) for _ in range(NUM_PLACES)]
        for place in range(NUM_PLACES):
            self.save(place)

    def save(self, place: int) -> None:
        self.places.save(place, key_of(place), [memoryview(bytearray(self.contents[place]))])

    def load(self, place: int) -> bytes | None:
        """None if it is lost."""
        found = bytearray(PLACE_BYTES)
        try:
            self.places.load(place, key_of(place), [memoryview(found)])
        except BlockLost:
            return None
        return bytes(found)

    def flip(self, place: int) -> None:
        """One bit of the place, or of the part of its record that means something."""
        name, size, used = self.random.choice(
            [(BLOCKS, PLACE_BYTES, PLACE_BYTES), (RECORDS, RECORD_BYTES, 32)]
        )
        self.change(name, place * size + self.random.randrange(used), 1)

    def tear(self, place: int) -> None:
        """The place has the first bytes of another write, whose record did not come."""
        num = self.random.randrange(1, PLACE_BYTES)
        self.change(BLOCKS, place * PLACE_BYTES, num)

    def cut(self, place: int) -> None:
        """The files end within the last place, or before."""
        with open(self.folder / BLOCKS, "r+b") as stream:
            stream.truncate(place * PLACE_BYTES + self.random.randrange(PLACE_BYTES))

    def change(self, name: str, start: int, num: int) -> None:
        with open(self.folder / name, "r+b") as stream:
            stream.seek(start)
            before = stream.read(num)
            mask = bytes([1 << self.random.randrange(8), *self.random.randbytes(num - 1)])
            stream.seek(start)
            stream.write(bytes(a ^ b for a, b in zip(before, mask, strict=True)))


@pytest.fixture
def store(tmp_path: Path) -> Iterator[DamagedStore]:
    store = DamagedStore(tmp_path, Random(1))
    yield store
    store.places.close()


def damage(store: DamagedStore, num_tries: int) -> None:
    for _ in range(num_tries):
        place = store.random.randrange(NUM_PLACES)
        how = store.random.choice([store.flip, store.tear, store.cut])
        how(place)
        assert store.load(place) is None, how
        others = [each for each in range(NUM_PLACES) if each < place or how != store.cut]
        for each in others:
            assert each == place or store.load(each) == store.contents[each]
        os.truncate(store.folder / BLOCKS, NUM_PLACES * PLACE_BYTES)
        for each in range(place, NUM_PLACES):
            store.save(each)


def test_damaged_places_are_found(store: DamagedStore) -> None:
    damage(store, 300)


@pytest.mark.slow
def test_damaged_places_are_found_in_many_tries(store: DamagedStore) -> None:
    damage(store, 10_000)
