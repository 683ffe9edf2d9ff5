"""Connections on one machine, to each other and to libzmq."""

import asyncio
import gc
import os
import socket
import weakref
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import zmq

from shared.errors import ConfigError
from shared.link.sockets import local
from shared.link.sockets.connection import OtherHosts, PeerGone
from shared.link.sockets.local import LocalConnection, LocalListening, dial
from shared.link.sockets.zmtp import handshake, pack

TIMEOUT_S = 10


class End:
    """The events at one end of connections."""

    def __init__(self) -> None:
        self.messages: list[tuple[LocalConnection, list[bytes]]] = []
        self.lost: list[tuple[LocalConnection, str]] = []

    def on_frames(self, connection: LocalConnection, frames) -> None:
        self.messages.append((connection, [bytes(frame) for frame in frames]))

    def on_lost(self, connection: LocalConnection, failure: str) -> None:
        self.lost.append((connection, failure))


async def until(is_so: Callable[[], object]) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while not is_so():
            await asyncio.sleep(0.005)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "s.sock"


@pytest.fixture
async def below(path: Path) -> AsyncIterator[End]:
    end = End()
    listening = LocalListening(path, end.on_frames, end.on_lost)
    yield end
    listening.close()
    listening.close()


async def test_messages_of_every_size_pass_both_ways_in_order(below: End, path: Path):
    above, messages = End(), [[b"", os.urandom(size)] for size in (0, 300, 70_000, 5 << 20, 1)]
    connection = dial(path, above.on_frames, above.on_lost)
    for message in messages:
        connection.send(message)
    await until(lambda: len(below.messages) == len(messages))
    assert [frames for _, frames in below.messages] == messages
    back = below.messages[0][0]
    for message in messages:
        back.send(message)
    assert back.has_unsent
    await until(lambda: len(above.messages) == len(messages))
    assert [frames for _, frames in above.messages] == messages
    assert not back.has_unsent
    connection.close()
    await until(lambda: below.lost)
    assert below.lost == [(back, "")]
    assert not above.lost


async def test_all_that_was_sent_arrives_before_the_loss(below: End, path: Path):
    above = End()
    connection = dial(path, above.on_frames, above.on_lost)
    messages = [[str(number).encode()] for number in range(500)]
    connection.send(messages[0])
    assert connection.has_unsent  # until the handshake is over
    await until(lambda: not connection.has_unsent)
    for message in messages[1:]:
        connection.send(message)
    connection.close()
    await until(lambda: below.lost)
    assert [frames for _, frames in below.messages] == messages
    with pytest.raises(PeerGone):
        connection.send([b"late"])


async def test_a_send_to_a_lost_peer_is_no_error_and_the_loss_comes_once(below: End, path: Path):
    above = End()
    connection = dial(path, above.on_frames, above.on_lost)
    connection.send([b"a"])
    await until(lambda: below.messages)
    connection.close()
    back = below.messages[0][0]
    back.send([b"x" * (1 << 20)])
    await until(lambda: below.lost)
    await asyncio.sleep(0.05)
    assert below.lost == [(back, "")]
    with pytest.raises(PeerGone):
        back.send([b"late"])


async def test_all_messages_of_a_peer_that_ends_unread_arrive(below: End, path: Path):
    """Its end is then an error of our socket."""
    sent = [[str(number).encode(), bytes(1000)] for number in range(100)]
    async with met(below, path) as (peer, back):
        back.send([b"never read"])
        await until(lambda: not back.has_unsent)
        peer.sendall(b"".join(piece for message in sent for piece in pack(message)))
    await until(lambda: below.lost)
    assert [frames for _, frames in below.messages] == sent
    assert below.lost == [(back, "")]


async def test_a_failed_send_does_not_overtake_messages_of_the_peer(below: End, path: Path):
    sent = [[str(number).encode(), bytes(1000)] for number in range(100)]
    async with met(below, path) as (peer, back):
        peer.sendall(b"".join(piece for message in sent for piece in pack(message)))
    for _ in range(3):
        back.send([b"to nobody"])
        back._flush()
    await until(lambda: below.lost)
    assert [frames for _, frames in below.messages] == sent


@asynccontextmanager
async def met(below: End, path: Path) -> AsyncIterator[tuple[socket.socket, LocalConnection]]:
    """A peer that reads nothing, after its first message has arrived, and the connection to it."""
    with socket.socket(socket.AF_UNIX) as peer:
        peer.connect(str(path))
        peer.sendall(handshake("DEALER") + b"".join(pack([b"first"])))
        await until(lambda: below.messages)
        yield peer, below.messages.pop()[0]


class Large(bytearray):
    """Bytes with an observable end."""


async def test_memory_of_a_closed_connection_is_freed_at_once(below: End, path: Path):
    """Without a search for cycles."""
    async with met(below, path) as (_, back):
        large = Large(8 << 20)
        freed = weakref.ref(large)
        back.send([memoryview(large)])
        del large
        gc.disable()
        try:
            back.close()
            assert freed() is None
        finally:
            gc.enable()


async def test_a_peer_that_does_not_read_delays_no_other(below: End, path: Path):
    stuck, above = socket.socket(socket.AF_UNIX), End()
    stuck.connect(str(path))
    stuck.sendall(handshake("DEALER") + b"\x00\x01a")
    connection = dial(path, above.on_frames, above.on_lost)
    connection.send([b"b"])
    await until(lambda: len(below.messages) == 2)
    for back, _ in below.messages:
        back.send([b"x" * (8 << 20)])
    await until(lambda: above.messages)
    stuck.close()
    await until(lambda: below.lost)


async def test_nobody_there_is_an_error_at_once(path: Path):
    end = End()
    with pytest.raises(FileNotFoundError):
        dial(path, end.on_frames, end.on_lost)
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    with pytest.raises(ConnectionRefusedError):
        dial(path, end.on_frames, end.on_lost)


@pytest.mark.parametrize(
    ("sent", "why"),
    [
        (b"", ""),
        (b"\xff\0", "it broke off"),
        (handshake("DEALER")[:70], "it broke off"),
        (b"GET / HTTP/1.1\r\n\r\n", "wrong bytes: no greeting of ZMTP"),
    ],
)
async def test_a_handshake_that_fails_is_a_loss_that_says_why(
    below: End, path: Path, sent: bytes, why: str
):
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.connect(str(path))
        stranger.sendall(sent)
    await until(lambda: below.lost)
    assert [failure for _, failure in below.lost] == [why]


async def test_a_peer_without_a_finished_handshake_is_lost(below: End, path: Path, monkeypatch):
    monkeypatch.setattr(local, "HELLO_S", 0.1)
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.connect(str(path))
        await until(lambda: below.lost)
    assert below.lost[0][1] == "nothing for 0.1 s"


async def test_a_handshake_that_came_while_we_stood_still_counts(
    below: End, path: Path, monkeypatch
):
    monkeypatch.setattr(local, "HELLO_S", 0)  # due before the first turn that reads
    with socket.socket(socket.AF_UNIX) as slow:
        slow.connect(str(path))
        slow.sendall(handshake("DEALER") + b"".join(pack([b"first"])))
        await until(lambda: below.messages or below.lost)
        assert not below.lost


@pytest.mark.parametrize("size", [10, 300, 100_000, 3 << 20])
async def test_libzmq_dials_us(below: End, path: Path, size: int):
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger = 0
        dealer.connect(f"ipc://{path}")
        message = [os.urandom(size), b"", os.urandom(size)]
        await asyncio.to_thread(dealer.send_multipart, message)
        await until(lambda: below.messages)
        below.messages[0][0].send(message)
        assert await asyncio.to_thread(dealer.recv_multipart) == message
    assert [frames for _, frames in below.messages] == [message]


@pytest.mark.parametrize("size", [10, 300, 100_000, 3 << 20])
async def test_we_dial_libzmq(path: Path, size: int):
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.linger = 0
        router.bind(f"ipc://{path}")
        router.rcvtimeo = 1000 * TIMEOUT_S
        end, message = End(), [os.urandom(size), b"", os.urandom(size)]
        connection = dial(path, end.on_frames, end.on_lost)
        connection.send(message)
        connection.send([b"last"])
        route, *found = await asyncio.to_thread(router.recv_multipart)
        assert found == message
        assert (await asyncio.to_thread(router.recv_multipart))[1:] == [b"last"]
        router.send_multipart([route, *message])
        await until(lambda: end.messages)
        assert end.messages == [(connection, message)]
        connection.close()


def test_without_the_part_for_other_machines_their_addresses_are_refused() -> None:
    hosts = OtherHosts(None)
    with pytest.raises(ConfigError, match="no connections to other machines"):
        hosts.source("scheduler", "host", 1)
    with pytest.raises(ConfigError, match="no connections to other machines"):
        hosts.listen("tcp://*:1", lambda *_: None, lambda *_: None, "worker")
