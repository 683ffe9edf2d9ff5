"""Makes large replies piece by piece on a thread, so that other streams are not held up."""

from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

from services.gateway.http.fair_time import on_thread

JSON_CHUNK_BYTES = 16 << 10
"""Written by the thread, holding the GIL, before the event loop gets its turn."""


class PieceMaker:
    """Runs generators of bytes on one thread, so that they take turns."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "pieces")

    async def send(
        self, pieces: Iterator[bytes], write: Callable[[bytes], Awaitable[None]]
    ) -> None:
        """Writes ``pieces``, joined to fewer ones; each is made after the one before is written."""
        while piece := await on_thread(self._thread, _gather, pieces):
            await write(piece)

    async def join(self, pieces: Iterator[bytes]) -> bytes:
        """All pieces in one."""
        joined = bytearray()

        async def keep(piece: bytes) -> None:
            joined.extend(piece)

        await self.send(pieces, keep)
        return bytes(joined)

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)


def _gather(pieces: Iterator[bytes]) -> bytes:
    """The pieces of one write; empty at the end."""
    gathered = bytearray()
    for piece in pieces:
        gathered += piece
        if len(gathered) >= JSON_CHUNK_BYTES:
            break
    return bytes(gathered)
