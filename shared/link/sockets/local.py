"""ZeroMQ over the sockets of one machine, spoken on the event loop itself.

libzmq has a thread of its own for input and output, so a message wakes one more thread on each
side; see docs/decisions/027. Here all messages of one turn of the loop go out at its end in one
call.
"""

import asyncio
import logging
import socket
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path

from shared.errors import ConfigError
from shared.link.sockets.connection import HELLO_S, NO_MEMORY, OnFrames, OnLost, PeerGone
from shared.link.sockets.zmtp import ProtocolError, Reader, SocketType, handshake, pack
from shared.wire.codec import Frame

log = logging.getLogger(__name__)

REMOTE = "a process of this machine"
BACKLOG = 1024
MAX_ACCEPTS_A_TURN = 64
MAX_PIECES_A_CALL = 256  # below the kernel's limit
PAUSE_S = 0.5  # after a failure to accept a connection


class LocalConnection:
    """One connection over a Unix socket; see ``Connection``. Reads once in each turn of the loop,
    so that a busy sender does not delay the others."""

    def __init__(
        self,
        connected: socket.socket,
        socket_type: SocketType,
        on_frames: OnFrames,
        on_lost: OnLost,
    ) -> None:
        self.remote = REMOTE
        self.owner: str | None = None
        self.is_closed = False
        self._socket = connected
        self._on_frames = on_frames
        self._on_lost = on_lost
        self._reader = Reader(socket_type)
        self._unsent: deque[memoryview] = deque()
        # Until the handshake is over: libzmq takes no message before.
        self._held: list[memoryview] = []
        self._has_spoken = False
        self._is_flushing = self._waits_for_room = False
        self._is_broken = False  # the other end no longer reads
        self._has_error = False
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(connected, self._read)
        self._deadline = self._loop.call_later(HELLO_S, self._end_silence)
        self._push([memoryview(handshake(socket_type))])

    @property
    def has_unsent(self) -> bool:
        return not self.is_closed and bool(self._unsent or self._held)

    def send(self, frames: Sequence[Frame]) -> None:
        if self.is_closed:
            raise PeerGone
        if self._is_broken:  # the loss is reported after all messages of the peer are read
            return
        if self._held or not self._reader.is_open:
            self._held += pack(frames)
        else:
            self._push(pack(frames))

    def _push(self, pieces: Sequence[memoryview]) -> None:
        self._unsent.extend(pieces)
        if not self._is_flushing:
            self._is_flushing = True
            self._loop.call_soon(self._flush)

    def close(self) -> None:
        if self.is_closed:
            return
        if not self._waits_for_room:
            self._write()
        self.is_closed = True
        self._deadline.cancel()
        self._loop.remove_reader(self._socket)
        self._loop.remove_writer(self._socket)
        self._socket.close()
        self._unsent.clear()  # now: peers and connections are cycles, which live on for a while
        self._held.clear()
        self._reader.forget()

    def _flush(self) -> None:
        """Writes as much as the kernel takes, all messages of one turn of the loop at once."""
        if self.is_closed:
            return
        self._write()
        if self._unsent and not self._waits_for_room:
            self._loop.add_writer(self._socket, self._flush)
        if self._waits_for_room and not self._unsent:
            self._loop.remove_writer(self._socket)
        self._is_flushing = self._waits_for_room = bool(self._unsent)

    def _write(self) -> None:
        """Leaves the loss of a peer to the reader, after all messages from it. A peer that is there
        but reads no more also ends for the reader."""
        try:
            while self._unsent:
                num_sent = self._socket.sendmsg(islice(self._unsent, MAX_PIECES_A_CALL))
                while num_sent:
                    piece = self._unsent.popleft()
                    if num_sent < len(piece):
                        self._unsent.appendleft(piece[num_sent:])
                    num_sent -= min(num_sent, len(piece))
        except BlockingIOError:
            pass
        except OSError:
            self._is_broken = True
            self._unsent.clear()
            with suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)

    def _read(self) -> None:
        if self.is_closed:
            return
        try:
            num_bytes = self._socket.recv_into(self._reader.space())
        except BlockingIOError:
            return
        except OSError:
            num_bytes = 0
        if num_bytes == 0:
            is_partial = self._reader.has_begun and not self._reader.is_open
            self._lose("it broke off" if is_partial else "")
            return
        try:
            for frames in self._reader.received(num_bytes):
                self._has_spoken = True
                self._on_frames(self, frames)
                if self.is_closed:
                    return
        except ProtocolError as error:
            self._lose(f"wrong bytes: {error}")
            return
        except MemoryError:
            self._lose(NO_MEMORY)
            return
        if self._held and self._reader.is_open:
            self._push(self._held)
            self._held = []
            # A peer that closed without reading our messages is an error of the socket, and then
            # uvloop calls a reader only once, even if more is unread.
        if self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self._has_error = True
        if self._has_error:
            self._loop.call_soon(self._read)

    def _end_silence(self) -> None:
        """Reads first: after a pause of our own, the message may have arrived."""
        if not self._has_spoken:
            self._read()
        if not self.is_closed and not self._has_spoken:
            self._lose("" if self._reader.is_open else f"nothing for {HELLO_S:g} s")

    def end(self) -> None:
        if not self.is_closed:
            self._lose("")

    def _lose(self, failure: str) -> None:
        self.close()
        self._on_lost(self, failure)


def dial(path: Path, on_frames: OnFrames, on_lost: OnLost) -> LocalConnection:
    """Raises OSError without a listener, with too many connections waiting to be accepted, or with
    too many open files in the process."""
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        made.connect(str(path))
    except OSError:
        made.close()
        raise
    return LocalConnection(made, "DEALER", on_frames, on_lost)


class LocalListening:
    """A Unix socket that others connect to. Raises ConfigError if it cannot be bound."""

    def __init__(self, path: Path, on_frames: OnFrames, on_lost: OnLost) -> None:
        self.address = f"ipc://{path}"
        self._on_frames = on_frames
        self._on_lost = on_lost
        self._connections: set[LocalConnection] = set()
        self._loop = asyncio.get_running_loop()
        self._pause: asyncio.TimerHandle | None = None
        self._is_failing = False
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            self._socket.bind(str(path))
            self._socket.listen(BACKLOG)
        except OSError as error:
            self._socket.close()
            raise ConfigError(f"cannot listen on {self.address}: {error.strerror}") from None
        self._listen()

    @property
    def has_unsent(self) -> bool:
        return any(each.has_unsent for each in self._connections)

    def close(self) -> None:
        if self._socket.fileno() < 0:
            return
        if self._pause is not None:
            self._pause.cancel()
        self._loop.remove_reader(self._socket)
        self._socket.close()
        for connection in list(self._connections):
            connection.close()

    def _listen(self) -> None:
        self._pause = None
        self._loop.add_reader(self._socket, self._accept)

    def _accept(self) -> None:
        for _ in range(MAX_ACCEPTS_A_TURN):
            try:
                accepted, _ = self._socket.accept()
            except BlockingIOError:
                return
            except ConnectionAbortedError:
                continue
            except OSError as error:  # for example too many open files
                if not self._is_failing:
                    log.warning("%s: accepts nobody: %s", self.address, error.strerror)
                self._is_failing = True
                self._loop.remove_reader(self._socket)
                self._pause = self._loop.call_later(PAUSE_S, self._listen)
                return
            self._is_failing = False
            accepted.setblocking(False)
            self._connections.add(LocalConnection(accepted, "ROUTER", self._on_frames, self._lose))

    def _lose(self, connection: LocalConnection, failure: str) -> None:
        self._connections.discard(connection)
        self._on_lost(connection, failure)
