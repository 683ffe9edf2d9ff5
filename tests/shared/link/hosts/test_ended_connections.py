"""Connections ended by a listener, over a Unix socket and over tcp."""

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import closing
from pathlib import Path

import pytest

from shared.link import listener
from shared.link.hosts import libzmq
from shared.link.peer import Peer
from shared.link.sockets import local
from shared.link.sockets.zmtp import handshake, pack
from shared.wire.codec import encode
from shared.wire.messages import PROTOCOL_MAJOR, Cancel, Hello, RequestKey
from tests.shared.recorder import TIMEOUT_S, Recorder, got

HELLO_S = 0.3
CANCEL = Cancel([RequestKey("r", 1)])
HELLO = Hello(PROTOCOL_MAJOR, 0, "gateway", "g")


class Stranger:
    """A socket with scripted ZMTP."""

    def __init__(self, address: str) -> None:
        kind, _, place = address.partition("://")
        if kind == "ipc":
            self._socket = socket.socket(socket.AF_UNIX)
            self._socket.connect(place)
        else:
            host, _, port = place.rpartition(":")
            self._socket = socket.create_connection((host, int(port)))
        self._received = b""
        self._socket.settimeout(TIMEOUT_S)
        self._socket.sendall(handshake("DEALER"))

    async def send(self, *frames: bytes) -> None:
        await asyncio.to_thread(self._send, frames)

    def _send(self, frames: Sequence[bytes]) -> None:
        """libzmq takes no message before it has sent READY itself."""
        while b"READY" not in self._received:
            self._received += self._socket.recv(1 << 16)
        for piece in pack(frames):
            self._socket.sendall(piece)

    async def received(self) -> bytes:
        """Everything received up to the end of the connection."""
        return await asyncio.to_thread(self._read)

    def _read(self) -> bytes:
        while some := self._socket.recv(1 << 16):
            self._received += some
        return self._received

    def close(self) -> None:
        self._socket.close()


@pytest.fixture(params=["ipc", "tcp"])
async def below(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[Recorder, str]]:
    """A tokenizer that gateways dial, and its address."""
    for module in (local, libzmq):
        monkeypatch.setattr(module, "HELLO_S", HELLO_S)
    monkeypatch.setattr(listener, "LINGER_S", 0.1)
    recorder = Recorder("tokenizer", "t")
    recorder.link.listen(tmp_path, "gateway", tcp="tcp://127.0.0.1:0")
    running = asyncio.create_task(recorder.link.run())
    yield recorder, recorder.link.addresses[request.param == "tcp"]
    running.cancel()
    await recorder.link.close("test over")


@pytest.fixture
def stranger(below: tuple[Recorder, str]) -> Iterator[Stranger]:
    found = Stranger(below[1])
    yield found
    found.close()


async def greeted(stranger: Stranger, recorder: Recorder) -> Peer:
    await stranger.send(*map(bytes, encode(HELLO)))
    return await got(recorder.ups)


async def test_one_that_says_nothing_is_closed(stranger: Stranger) -> None:
    assert b"Hello" not in await stranger.received()


async def test_one_that_was_refused_is_closed_after_the_reason(stranger: Stranger) -> None:
    await stranger.send(*map(bytes, encode(CANCEL)))
    assert b"the first message must be Hello" in await stranger.received()


async def test_a_peer_that_sent_a_bad_message_is_closed(
    below: tuple[Recorder, str], stranger: Stranger
) -> None:
    one = await greeted(stranger, below[0])
    await stranger.send(b"nonsense")
    await stranger.received()
    assert await got(below[0].downs) == (one, "a bad message")


async def test_a_peer_that_was_dropped_is_closed(
    below: tuple[Recorder, str], stranger: Stranger
) -> None:
    one = await greeted(stranger, below[0])
    below[0].link.drop(one, "silent for 2 s")
    await stranger.received()
    assert await got(below[0].downs) == (one, "silent for 2 s")


async def test_a_peer_whose_message_finds_no_memory_is_lost_and_no_other(
    below: tuple[Recorder, str], stranger: Stranger, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder, address = below
    one = await greeted(stranger, recorder)

    def fail(peer: Peer, message: object, arrays: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(recorder, "on_message", fail)
        await stranger.send(*map(bytes, encode(CANCEL)))
        await stranger.received()
        assert (await got(recorder.downs))[0] is one
    with closing(Stranger(address)) as other:
        assert (await greeted(other, recorder)).is_up


async def test_one_that_has_said_hello_stays(
    below: tuple[Recorder, str], stranger: Stranger
) -> None:
    one = await greeted(stranger, below[0])
    await asyncio.sleep(2 * HELLO_S)
    assert one.is_up
