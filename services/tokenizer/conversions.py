"""Conversions of text to ids or ids to text for gateways, apart from requests."""

import asyncio
import logging
from collections.abc import Callable, Sequence

from services.tokenizer.chat.template_options import num_chars
from services.tokenizer.lanes import Lanes
from services.tokenizer.media_reader import MediaReader
from services.tokenizer.metrics import OPEN_CONVERSIONS
from services.tokenizer.prepare import convert
from services.tokenizer.text_model import TextModel
from shared.errors import InternalError, RequestError
from shared.link.peer import Peer
from shared.wire.codec import Array
from shared.wire.messages import Convert, Converted

log = logging.getLogger(__name__)

Key = tuple[Peer, str]  # each gateway gives its own names


class Conversions:
    """The open conversions; ``on_end`` is called after each, on success and on failure."""

    def __init__(
        self,
        text: TextModel,
        lanes: Lanes,
        tasks: asyncio.TaskGroup,
        on_end: Callable[[], None],
        media: MediaReader,
    ) -> None:
        self._text = text
        self._lanes = lanes
        self._tasks = tasks
        self._on_end = on_end
        self._media = media
        self._open: dict[Key, asyncio.Task[None]] = {}

    def __len__(self) -> int:
        return len(self._open)

    def begin(self, gateway: Peer, message: Convert, data: Array, files: Sequence[Array]) -> None:
        """Raises InternalError for a name that is open already."""
        key = gateway, message.request
        if key in self._open:
            raise InternalError(f"there is a conversion {message.request} already")
        work = self._convert(gateway, message, data, files)
        task = self._open[key] = self._tasks.create_task(work)
        OPEN_CONVERSIONS.set(len(self))
        task.add_done_callback(lambda _: self._end(key, task))

    def cancel(self, gateway: Peer, name: str) -> None:
        """Stops a conversion that has not begun. Ignored for a name that is not open."""
        if task := self._open.get((gateway, name)):
            self._end((gateway, name), task)
            task.cancel()

    def lose(self, gateway: Peer) -> None:
        for peer, name in list(self._open):
            if peer is gateway:
                self.cancel(peer, name)

    async def _convert(
        self, gateway: Peer, message: Convert, data: Array, files: Sequence[Array]
    ) -> None:
        name = message.request
        try:
            salt = owner = message.owner
            with await self._media.read(message, files, salt, owner) as media:
                array = await self._lanes.run(
                    owner,
                    data.nbytes + num_chars(message.chat),
                    lambda: convert(self._text, message, data, media),
                )
            gateway.send(Converted(name), array)
        except RequestError as error:
            gateway.send(error.to_failed(name, 0))
        except Exception:  # one request fails, and no other
            log.exception("request %s cannot be converted", name)
            gateway.send(InternalError("the text could not be converted").to_failed(name, 0))

    def _end(self, key: Key, task: asyncio.Task[None]) -> None:
        """Its name may be another's by now."""
        if self._open.get(key) is task:
            del self._open[key]
            OPEN_CONVERSIONS.set(len(self))
            self._on_end()
