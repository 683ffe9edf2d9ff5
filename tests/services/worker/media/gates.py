"""A tower that waits."""

from collections.abc import Callable
from queue import SimpleQueue
from threading import Event

import numpy as np
from torch import Tensor

from services.worker.media.encoder import Encoder

WAIT_S = 60


class Gate:
    """Lets ``encode`` through once it is open. ``begun`` gets the first number of each image."""

    def __init__(self, encode: Callable[[np.ndarray], Tensor]) -> None:
        self._encode = encode
        self._is_open = Event()
        self.begun: SimpleQueue[int] = SimpleQueue()

    def __call__(self, pixels: np.ndarray) -> Tensor:
        self.begun.put(int(pixels.flat[0]))
        assert self._is_open.wait(WAIT_S)
        return self._encode(pixels)

    def open(self) -> None:
        self._is_open.set()

    def open_once_awaited(self, encoder: Encoder) -> None:
        wait = encoder._changed.wait

        def open_and_wait() -> bool:
            self.open()
            return wait(WAIT_S)

        encoder._changed.wait = open_and_wait  # type: ignore[assignment,method-assign]

    @property
    def rest(self) -> list[int]:
        """All calls since the last look."""
        return [self.begun.get() for _ in range(self.begun.qsize())]
