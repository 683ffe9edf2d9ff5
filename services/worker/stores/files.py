"""The parts of stores: places of blocks, and behind them of states."""

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from services.worker.stores.folder import HEADER, Header, Part, read_header
from services.worker.stores.places import OwnPlaces, Places
from shared.wire.messages import FIRST_STATE

AnyPlaces = TypeVar("AnyPlaces", bound=Places)


class Found(NamedTuple, Generic[AnyPlaces]):
    """The place of a block, or of a state."""

    places: AnyPlaces
    number: int
    is_state: bool


class StoreFiles(Generic[AnyPlaces]):
    """The parts of a store, opened by ``open_part``. Raises OSError."""

    def __init__(self, header: Header, open_part: Callable[[Part], AnyPlaces]) -> None:
        self.header = header
        self.parts: list[AnyPlaces] = []
        try:
            for each in header.parts:
                self.parts.append(open_part(each))
        except OSError:
            self.close()
            raise

    def find(self, place: int) -> Found[AnyPlaces]:
        """Of a place that no part has, the number is too large."""
        if len(self.parts) == 1 or place < FIRST_STATE:
            return Found(self.parts[0], place, False)
        return Found(self.parts[1], place - FIRST_STATE, True)

    @property
    def is_removed(self) -> bool:
        return self.parts[0].is_removed

    def close(self) -> None:
        for each in self.parts:
            each.close()


def inventory_of(own: StoreFiles[OwnPlaces]) -> tuple[np.ndarray, np.ndarray]:
    """The keys of full places and their numbers."""
    places: dict[bytes, int] = {}  # the last of a key
    for first, part in zip((0, FIRST_STATE), own.parts, strict=False):
        places |= {key: first + place for place, key in part.keys.items()}
    return np.frombuffer(b"".join(places), np.uint8), np.array([*places.values()], np.int32)


class OtherStores:
    """The stores of all workers in ``location``, opened as they are needed."""

    def __init__(self, location: Path, header: Header) -> None:
        """Only stores with the layout and the sizes of ``header`` are found."""
        self._location = location
        self._wanted = _layout_of(header)
        self._open: dict[str, StoreFiles[Places]] = {}

    def find(self, store: str) -> StoreFiles[Places] | None:
        found = self._open.get(store)
        if found is not None and found.is_removed:
            self._open.pop(store).close()
            found = None
        return found or self._look_for(store)

    def _look_for(self, store: str) -> StoreFiles[Places] | None:
        for path in self._location.glob(f"*/{HEADER}"):
            header = read_header(path.parent)
            if header is None or header.id != store:
                continue
            if _layout_of(header) == self._wanted:
                with suppress(OSError):
                    self._open[store] = StoreFiles(header, partial(Places, path.parent))
                    return self._open[store]
        return None


def _layout_of(header: Header) -> tuple[int, str, int, int]:
    return header.format, header.layout, header.place_bytes, header.state_bytes
