"""The encoders that a worker gives its images to: workers of the role ``encoder``."""

import asyncio
import logging
import zlib
from functools import partial
from typing import Final

from torch import Tensor

from services.worker.media.encoder import Encoder
from services.worker.media.form import FeatureForm
from shared.errors import CodecError
from shared.link.keys import load_keys
from shared.link.link import Link
from shared.link.peer import Peer, count_bad
from shared.settings.worker import WorkerConfig
from shared.wire.codec import Array
from shared.wire.messages import (
    ENCODERS_MINOR,
    PROTOCOL_MAJOR,
    PROTOCOL_MINOR,
    Encode,
    Features,
    Heartbeat,
    Hello,
    Item,
    Message,
    ServiceName,
    State,
)

log = logging.getLogger(__name__)

SERVICE: Final[ServiceName] = "worker"
ROLE = "encoder"  # of the socket
AHEAD = 2  # items of a worker at an encoder, so that it need not wait for the next one. Chosen


def hello_of(config: WorkerConfig, form: FeatureForm) -> Hello:
    return Hello(PROTOCOL_MAJOR, PROTOCOL_MINOR, SERVICE, config.instance, layout=form.layout)


def why_unlike(hello: Hello, form: FeatureForm) -> str | None:
    """The reason that features of ``form`` are not exchanged with a peer, or None."""
    if hello.minor < ENCODERS_MINOR:
        return f"protocol minor {hello.minor} knows of no encoders, {ENCODERS_MINOR} does"
    if hello.layout != form.layout:
        return "its features differ: of other weights, another dtype, software or machine"
    return None


class OtherEncoders:
    """Gives the items of ``encoder`` to ready peers, and takes the items of lost ones back. A peer
    whose features are damaged is lost."""

    def __init__(self, config: WorkerConfig, encoder: Encoder, form: FeatureForm) -> None:
        self._encoder, self._form = encoder, form
        self._given: dict[Peer, dict[bytes, Item]] = {}  # by digest, until they are there
        self._link = Link(hello_of(config, form), self, load_keys(config.keys, SERVICE))
        self._link.dial(SERVICE, config.mesh_dir, ROLE, tcp=config.encoder_address)

    async def run(self) -> None:
        try:
            await self._link.run()
        finally:
            await self._link.close("the worker leaves")

    def give(self) -> None:
        """As many items as encoders take."""
        while (peer := self._free()) is not None:
            if (found := self._encoder.give_away()) is None:
                return
            item, pixels = found
            self._given[peer][item.digest] = item
            peer.send(Encode(item), pixels)

    def _free(self) -> Peer | None:
        """The ready one with the fewest items."""
        free = [each for each in self._ready() if len(self._given[each]) < AHEAD]
        return min(free, key=lambda each: len(self._given[each]), default=None)

    def _ready(self) -> list[Peer]:
        return [each for each in self._given if each.is_ready]

    def _look(self) -> None:
        self._encoder.use_others(bool(self._ready()))

    def status(self) -> Heartbeat:
        return Heartbeat(State.READY, "", sum(map(len, self._given.values())), 0)

    def refusal(self, hello: Hello) -> str | None:
        return why_unlike(hello, self._form)

    def on_up(self, peer: Peer) -> None:
        self._given[peer] = {}
        peer.on_state = self._look

    def on_down(self, peer: Peer, reason: str) -> None:
        items = self._given.pop(peer).values()
        self._look()
        self._encoder.take_back(items)

    def on_message(self, peer: Peer, message: Message, arrays: list[Array]) -> None:
        """Raises CodecError for features that were not asked for."""
        if not isinstance(message, Features):
            log.warning("%s sent a %s, which is not for us", peer, type(message).__name__)
            return
        item, (content,) = self._given[peer].get(message.digest), arrays
        if item is None:
            raise CodecError("features of an item that it was not given")
        if content.nbytes != (num := self._form.num_bytes(item)):
            raise CodecError(f"features of {content.nbytes} bytes; the item has {num}")
        loop = asyncio.get_running_loop()
        checked = loop.run_in_executor(None, self._checked, item, content, message.checksum)
        checked.add_done_callback(partial(self._add, peer, item))

    def _checked(self, item: Item, content: Array, checksum: int) -> Tensor | None:
        """On another thread; None if they are damaged."""
        is_whole = zlib.crc32(content.data) == checksum
        return self._form.unpack(content, item) if is_whole else None

    def _add(self, peer: Peer, item: Item, checked: "asyncio.Future[Tensor | None]") -> None:
        if checked.cancelled() or self._given.get(peer, {}).get(item.digest) is not item:
            return  # the peer is lost
        features = checked.result()
        if features is None:
            count_bad(repr(peer), CodecError("features with another checksum"))
            self._link.drop(peer, "features with another checksum")
            return
        del self._given[peer][item.digest]
        self._encoder.add_features(item, features)
        self.give()
