"""One request on its way through the mesh, as the HTTP handler sees it."""

import asyncio
from typing import NamedTuple, Self

from shared.errors import RequestError
from shared.messages import Finished


class Progress(NamedTuple):
    """What came since the last look: text (maybe none), its tokens, and the end if it was that."""

    text: str
    num_tokens: int
    finished: Finished | None


class Exchange:
    """A mailbox that merges: however far its reader lags, it holds one text and one end.

    The mesh writes, one handler reads: ``accepted`` once, then Progress after Progress until the
    end. What is pending is read before an error is raised.
    """

    def __init__(self) -> None:
        self._is_accepted = False
        self._texts: list[str] = []
        self._num_tokens = 0
        self._finished: Finished | None = None
        self._error: RequestError | None = None
        self._is_read = False
        self._changed = asyncio.Event()

    def accept(self) -> None:
        self._is_accepted = True
        self._changed.set()

    def add(self, text: str, num_tokens: int) -> None:
        self._texts.append(text)
        self._num_tokens += num_tokens
        self._changed.set()

    def finish(self, finished: Finished) -> None:
        self._finished = finished
        self._changed.set()

    def fail(self, error: RequestError) -> None:
        self._error = error
        self._changed.set()

    async def accepted(self) -> None:
        """Returns when the request will run. Raises the RequestError that refused it."""
        while not self._is_accepted:
            await self._change()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Progress:
        """Raises the RequestError that ended the request."""
        if self._is_read:
            raise StopAsyncIteration
        while not self._texts and self._finished is None:
            await self._change()
        progress = Progress("".join(self._texts), self._num_tokens, self._finished)
        self._texts.clear()
        self._num_tokens = 0
        self._is_read = self._finished is not None
        return progress

    async def _change(self) -> None:
        if self._error is not None:
            raise self._error
        self._changed.clear()
        await self._changed.wait()
