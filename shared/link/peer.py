"""The other end of a connection, and the interface between a service and its link."""

import logging
import re
import time
from collections.abc import Callable, Sequence
from typing import Literal, Protocol

import msgspec

from shared.errors import CodecError
from shared.process.log import LogOnce, peer_text
from shared.process.metrics import BAD_MESSAGES, LINK_ROUND_TRIP, MESSAGE_BYTES, MESSAGES
from shared.wire.codec import Array, Frame, HeaderTooLong, decode
from shared.wire.halves import halves
from shared.wire.messages import (
    INSTANCE,
    OPTIONS_MINOR,
    Heartbeat,
    Hello,
    Message,
    ServiceName,
    State,
)
from shared.wire.older import for_older

log = logging.getLogger(__name__)

SILENCE_S = 2.0


class Peer:
    """One connection to one process, from Hello to loss: an epoch. A reconnect is another Peer.

    ``status`` is its last heartbeat; ``on_state`` is called when that changes the state. A peer's
    loss ``is_explained`` if it said Bye, or if we stood still ourselves: then its work is not the
    reason. ``stood_still``: the epoch before was lost because the process stood still, and the
    process has survived.
    """

    def __init__(
        self, hello: Hello, send: Callable[["Peer", Message, tuple[Array, ...]], None]
    ) -> None:
        self.hello = hello
        self.status = Heartbeat(State.NOT_READY, "no heartbeat yet", 0, 0)
        self.last_seen_s = time.monotonic()
        self.is_up = True
        self.is_explained = False
        self.stood_still = False
        self.on_state: Callable[[], None] = lambda: None
        self._send = send
        self._round_trip = RoundTrip()
        self._round_trip_seconds = LINK_ROUND_TRIP.labels(hello.service)
        self._counters = {
            direction: (
                MESSAGES.labels(hello.service, direction),
                MESSAGE_BYTES.labels(hello.service, direction),
            )
            for direction in ("in", "out")
        }

    def __repr__(self) -> str:
        return f"{self.hello.service} {self.hello.instance}"

    @property
    def is_ready(self) -> bool:
        return self.status.state == State.READY

    @property
    def is_older(self) -> bool:
        """True if it knows of no RequestOptions."""
        return self.hello.minor < OPTIONS_MINOR

    @property
    def round_trip_s(self) -> float | None:
        """The round-trip time of the last returned heartbeat; None before the first."""
        return self._round_trip.last_s

    def count(self, direction: Literal["in", "out"], num_bytes: int) -> None:
        messages, message_bytes = self._counters[direction]
        messages.inc()
        message_bytes.inc(num_bytes)

    def note_heartbeat(self, heartbeat: Heartbeat) -> bool:
        """Returns true if its state has changed. Raises CodecError for an overview with an invalid
        name of a scheduler."""
        for overview in heartbeat.overviews:
            if not re.fullmatch(INSTANCE, overview.scheduler):
                raise CodecError(f"an overview by {overview.scheduler!r}")
        has_changed = heartbeat.state != self.status.state
        self.status = msgspec.structs.replace(heartbeat, reason=peer_text(heartbeat.reason))
        round_trip_s = self._round_trip.note_heartbeat(heartbeat, time.monotonic())
        if round_trip_s is not None:
            self._round_trip_seconds.observe(round_trip_s)
        if has_changed:
            self.on_state()
        return has_changed

    def send_heartbeat(self, status: Heartbeat) -> None:
        """Sends our heartbeat."""
        self.send(self._round_trip.stamped(status, time.monotonic()))

    def send(self, message: Message, *arrays: Array) -> None:
        """Queues a message; arrays of 64 KiB or more are not copied and must not change any more.

        To a lost peer nothing is sent and nothing raised: ``on_down`` is called for it, once. Lists
        that are too long for one header go in several messages. Raises ValueError if a message
        still breaks the limits of the wire: that is our mistake, and not one of the peer whose
        message we are handling.
        """
        if not self.is_up:
            return
        try:
            self._send(self, for_older(message) if self.is_older else message, arrays)
        except CodecError as error:
            parts = halves(message, arrays) if isinstance(error, HeaderTooLong) else []
            if not parts:
                raise ValueError(f"to {self}: {error}") from error
            for part, buffers in parts:
                self.send(part, *buffers)


class Handler(Protocol):
    """A service as its link sees it. Nothing here may block. An exception ends the service, except
    for a CodecError of ``on_message``, for a message whose parts do not fit: that ends the peer's
    epoch, because the loss from the message is unknown."""

    def status(self) -> Heartbeat:
        """The content of our heartbeats; called twice a second and when a peer's state changes."""

    def refusal(self, hello: Hello) -> str | None:
        """Why this peer is not welcome, or None."""

    def on_up(self, peer: Peer) -> None: ...

    def on_message(self, peer: Peer, message: Message, arrays: list[Array]) -> None: ...

    def on_down(self, peer: Peer, reason: str) -> None: ...


class PeerEvents(Protocol):
    """A link as its listeners and dialers see it."""

    @property
    def hello(self) -> Hello: ...

    def refusal(self, hello: Message | None, service: ServiceName) -> str | None:
        """Why ``hello`` (None: bytes that do not decode) is no acceptable first message of a
        ``service``, or None."""

    def up(self, peer: Peer) -> None: ...

    def received(
        self, peer: Peer, message: Message, arrays: list[Array], num_bytes: int
    ) -> None: ...

    def down(self, peer: Peer, reason: str, is_lost: bool) -> None: ...


_bad_senders = LogOnce()


def try_decode(frames: list[Frame], sender: str) -> tuple[Message, list[Array]] | None:
    """The message, or None for bytes that are none."""
    try:
        return decode(frames)
    except CodecError as error:
        count_bad(sender, error)
        return None


def count_bad(sender: str, error: CodecError) -> None:
    """Counts a message that cannot be decoded; logged once for each sender."""
    BAD_MESSAGES.inc()
    if _bad_senders.is_new(sender):
        log.warning("%s sent a bad message: %s", sender, peer_text(str(error)))


def count_sent(peer: Peer, message: Message, frames: Sequence[Frame]) -> None:
    if not isinstance(message, Heartbeat):
        peer.count("out", sum(map(len, frames)))


class RoundTrip:
    """Measures round trips by the heartbeats of one connection. ``now_s`` is our monotonic clock; a
    peer sends its times back, with how long it held them by its own clock. ``last_s`` is the last
    one."""

    def __init__(self) -> None:
        self._received_s = 0.0  # when the peer's last heartbeat came
        self._to_echo_s = 0.0  # the ``sent_s`` of that heartbeat
        self._last_echo_s = 0.0
        self.last_s: float | None = None

    def stamped(self, heartbeat: Heartbeat, now_s: float) -> Heartbeat:
        """``heartbeat`` as this peer gets it now."""
        held_s = now_s - self._received_s if self._to_echo_s else 0.0
        return msgspec.structs.replace(
            heartbeat, sent_s=now_s, echo_s=self._to_echo_s, held_s=held_s
        )

    def note_heartbeat(self, heartbeat: Heartbeat, now_s: float) -> float | None:
        """Seconds of travel of our heartbeat and its echo; None without a new echo, or with an
        impossible one."""
        self._received_s, self._to_echo_s = now_s, heartbeat.sent_s
        elapsed_s = now_s - heartbeat.echo_s
        if not (self._last_echo_s < heartbeat.echo_s and 0 <= heartbeat.held_s <= elapsed_s):
            return None
        self._last_echo_s = heartbeat.echo_s
        self.last_s = elapsed_s - heartbeat.held_s
        return self.last_s
