"""Real sockets between two links of one process."""

import asyncio
import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path
from socket import AF_UNIX
from socket import socket as StreamSocket  # noqa: N812

import numpy as np
import pytest
import zmq

from shared import link as link_module
from shared.codec import MAX_HEADER_BYTES, Array, encode
from shared.errors import CodecError, ConfigError
from shared.messages import (
    PROTOCOL_MAJOR,
    Accepted,
    Cancel,
    Hello,
    Message,
    RequestKey,
    State,
    Tokens,
)
from shared.metrics import BAD_MESSAGES, LINK_ROUND_TRIP, PEERS_REFUSED
from shared.peer import Peer
from shared.token_arrays import TokenArrays
from tests.shared.recorder import TIMEOUT_S, Recorder, got


class Pair:
    """A gateway that dials and a tokenizer that listens."""

    def __init__(self, directory: Path, refuses: str | None = None) -> None:
        self.directory = directory
        self.lower = Recorder("tokenizer", "t0", refuses)
        self.upper = Recorder("gateway", "g0")
        self.lower.link.listen(directory, "gateway")
        self.upper.link.dial("tokenizer", directory)
        self.tasks = [asyncio.create_task(each.link.run()) for each in (self.lower, self.upper)]

    async def up(self) -> tuple[Peer, Peer]:
        """The upper's peer, then the lower's."""
        async with asyncio.timeout(TIMEOUT_S):
            return await self.upper.ups.get(), await self.lower.ups.get()

    async def close(self) -> None:
        for task in self.tasks:
            task.cancel()
        await self.upper.link.close("test over")
        await self.lower.link.close("test over")


@pytest.fixture
async def pair(tmp_path: Path) -> Iterator[Pair]:
    pair = Pair(tmp_path)
    yield pair
    await pair.close()


async def test_hello_is_exchanged_and_messages_pass_both_ways(pair: Pair):
    down, up = await pair.up()
    assert (down.hello.instance, up.hello.instance) == ("t0", "g0")
    down.send(Cancel([RequestKey("r", 1)]))
    up.send(Tokens([], []), *TokenArrays(np.arange(5, dtype=np.int32)))
    assert (await got(pair.lower.messages))[1] == Cancel([RequestKey("r", 1)])
    assert (await got(pair.upper.messages))[2][0].tolist() == [0, 1, 2, 3, 4]


async def test_an_array_of_forty_megabytes_arrives_equal(pair: Pair):
    _, up = await pair.up()
    ids = np.random.default_rng(0).integers(0, 2**31, 10 << 20, dtype=np.int32)
    up.send(Tokens([], []), *TokenArrays(ids))
    assert np.array_equal((await got(pair.upper.messages))[2][0], ids)


async def test_ten_thousand_messages_arrive_in_order(pair: Pair):
    down, _ = await pair.up()
    for number in range(10_000):
        down.send(Cancel([RequestKey("r", number)]))
    for number in range(10_000):
        assert (await got(pair.lower.messages))[1].keys[0].attempt == number


async def test_a_state_reaches_the_peer_at_once_when_it_changes(pair: Pair):
    down, _ = await pair.up()
    while not down.is_ready:
        await asyncio.sleep(0.01)
    pair.lower.state = State.DRAINING
    pair.lower.link.tell_status(only_changes=True)
    async with asyncio.timeout(TIMEOUT_S):
        while down.status.state != State.DRAINING:
            await asyncio.sleep(0.01)


def num_round_trips(service: str) -> float:
    samples = LINK_ROUND_TRIP.labels(service)._child_samples()
    return next(each.value for each in samples if each.name == "_count")


async def test_both_ends_of_a_link_measure_the_round_trip_of_heartbeats(pair: Pair, monkeypatch):
    monkeypatch.setattr(link_module, "HEARTBEAT_S", 0.05)
    before = {service: num_round_trips(service) for service in ("gateway", "tokenizer")}
    await pair.up()
    async with asyncio.timeout(TIMEOUT_S):
        while any(num_round_trips(service) == num for service, num in before.items()):
            await asyncio.sleep(0.01)


async def test_bye_is_no_loss_and_a_new_instance_is_dialled(pair: Pair):
    down, _ = await pair.up()
    await pair.lower.link.close("done")
    assert await got(pair.upper.downs) == (down, "done")
    pair.lower = Recorder("tokenizer", "t1")
    pair.lower.link.listen(pair.directory, "gateway")
    assert (await got(pair.upper.ups)).hello.instance == "t1"


async def test_a_peer_that_was_refused_hears_why_and_nobody_is_up(tmp_path: Path, caplog):
    pair = Pair(tmp_path, refuses="not today")
    before = PEERS_REFUSED._value.get()
    async with asyncio.timeout(TIMEOUT_S):
        while "refused us: not today" not in caplog.text:
            await asyncio.sleep(0.01)
    assert PEERS_REFUSED._value.get() > before
    assert pair.upper.ups.empty()
    assert pair.lower.ups.empty()
    await pair.close()


@pytest.fixture
def raw(pair: Pair) -> Iterator[zmq.Socket]:
    """A bare DEALER on the tokenizer's socket."""
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.rcvtimeo = TIMEOUT_S * 1000
    socket.connect(f"ipc://{pair.directory / 'tokenizer-t0.sock'}")
    yield socket
    context.destroy(linger=0)


@pytest.mark.parametrize(
    "first",
    [
        [b"garbage"],
        encode(Accepted("r", 1)),
        encode(Hello(PROTOCOL_MAJOR + 1, 0, "gateway", "g")),
        encode(Hello(PROTOCOL_MAJOR, 0, "worker", "w")),
    ],
)
async def test_a_first_message_that_is_no_good_hello_is_refused(pair: Pair, raw, first):
    await pair.up()
    raw.send_multipart(first)
    reply = await asyncio.to_thread(raw.recv_multipart)
    assert b"\x04" in reply[0][:3]  # the tag of Refused
    assert pair.lower.ups.empty()


@pytest.mark.parametrize("garbage", [[b"\xc1", b"x"], [b""]])
async def test_garbage_ends_the_peer_that_sent_it_and_harms_nobody_else(pair: Pair, raw, garbage):
    down, _ = await pair.up()
    raw.send_multipart(encode(Hello(PROTOCOL_MAJOR, 0, "gateway", "g1")))
    peer = await got(pair.lower.ups)
    before = BAD_MESSAGES._value.get()
    raw.send_multipart(garbage)
    raw.send_multipart(encode(Cancel([RequestKey("after", 1)])))
    assert await got(pair.lower.downs) == (peer, "a bad message")
    assert BAD_MESSAGES._value.get() == before + 1
    down.send(Cancel([RequestKey("other", 1)]))
    assert (await got(pair.lower.messages))[1].keys[0].request == "other"


@pytest.mark.parametrize("is_below", [True, False])
async def test_a_message_whose_parts_do_not_fit_ends_the_peer_and_another_epoch_begins(
    pair: Pair, monkeypatch, caplog, is_below: bool
):
    down, up = await pair.up()
    reader, sender = (pair.lower, down) if is_below else (pair.upper, up)

    def on_message(peer: Peer, message: Message, arrays: list[Array]) -> None:
        raise CodecError("the rows count other tokens than the arrays hold")

    monkeypatch.setattr(reader, "on_message", on_message)
    before = BAD_MESSAGES._value.get()
    sender.send(Cancel([]))
    reason = "a bad message: the rows count other tokens than the arrays hold"
    assert (await got(reader.downs))[1] == reason
    await got((pair.upper if is_below else pair.lower).downs)
    assert BAD_MESSAGES._value.get() == before + 1
    assert caplog.text.count(f"is down: {reason}") == 1
    await pair.up()


async def test_a_message_too_large_to_send_is_our_mistake_and_no_bad_message(pair: Pair):
    down, _ = await pair.up()
    with pytest.raises(ValueError, match=str(MAX_HEADER_BYTES)):
        down.send(Cancel([RequestKey("x" * MAX_HEADER_BYTES, 1)]))


async def test_a_peer_of_another_minor_is_welcome_and_its_protocol_is_logged(
    pair: Pair, raw, caplog
):
    caplog.set_level(logging.INFO)
    await pair.up()
    raw.send_multipart(encode(Hello(PROTOCOL_MAJOR, 7, "gateway", "g1")))
    assert (await got(pair.lower.ups)).hello.instance == "g1"
    assert f"gateway g1 is up, with protocol {PROTOCOL_MAJOR}.7" in caplog.messages
    assert "gateway g0 is up" in caplog.messages


async def test_a_second_connection_of_one_process_is_refused(pair: Pair, raw):
    await pair.up()
    raw.send_multipart(encode(pair.upper.link.hello))
    reply = await asyncio.to_thread(raw.recv_multipart)
    assert b"gateway g0 is connected already" in reply[0]
    assert pair.lower.ups.empty()


async def test_a_connection_that_closes_is_a_loss_at_once(pair: Pair, raw):
    await pair.up()
    raw.send_multipart(encode(Hello(PROTOCOL_MAJOR, 0, "gateway", "g1")))
    peer = await got(pair.lower.ups)
    raw.close(linger=0)
    assert await got(pair.lower.downs) == (peer, "disconnected")


async def test_descriptors_used_again_never_end_the_wrong_peer(pair: Pair):
    """Connections come and go, so the kernel gives their descriptors out anew."""
    _, first = await pair.up()
    address = f"ipc://{pair.directory / 'tokenizer-t0.sock'}"
    context = zmq.Context()
    for number in range(100):
        with StreamSocket(AF_UNIX) as silent:
            silent.connect(address.removeprefix("ipc://"))
        socket = context.socket(zmq.DEALER)
        socket.connect(address)
        socket.send_multipart(encode(Hello(PROTOCOL_MAJOR, 0, "gateway", f"n{number}")))
        peer = await got(pair.lower.ups)
        assert peer.is_up
        socket.close(linger=0)
    for _ in range(100):
        assert (await got(pair.lower.downs))[0] is not first
    assert first.is_up
    context.destroy(linger=0)


async def test_sending_to_a_peer_that_just_died_raises_nothing_and_on_down_tells(tmp_path: Path):
    context = zmq.Context()
    router = context.socket(zmq.ROUTER)
    router.bind(f"ipc://{tmp_path / 'tokenizer-t0.sock'}")
    upper = Recorder("gateway", "g0")
    upper.link.dial("tokenizer", tmp_path)
    running = asyncio.create_task(upper.link.run())
    route, *_ = await asyncio.to_thread(router.recv_multipart)
    router.send_multipart([route, *encode(Hello(PROTOCOL_MAJOR, 0, "tokenizer", "t0"))])
    peer = await got(upper.ups)
    context.destroy(linger=0)
    time.sleep(0.2)  # noqa: ASYNC251 - our loop must not turn, so that it has not read of the loss
    peer.send(Cancel([RequestKey("r", 1)]))
    assert await got(upper.downs) == (peer, "disconnected")
    peer.send(Cancel([RequestKey("r", 1)]))
    running.cancel()
    await upper.link.close("test over")


async def test_silence_ends_a_peer(pair: Pair, raw, monkeypatch):
    monkeypatch.setattr(link_module, "HEARTBEAT_S", 0.05)
    monkeypatch.setattr(link_module, "SILENCE_S", 0.5)
    await pair.up()
    raw.send_multipart(encode(Hello(PROTOCOL_MAJOR, 0, "gateway", "g1")))
    silent = await got(pair.lower.ups)
    peer, reason = await got(pair.lower.downs)
    assert peer is silent
    assert "silent" in reason


async def test_a_socket_path_too_long_is_a_config_error(tmp_path: Path):
    recorder = Recorder("tokenizer", "x" * 100)
    with pytest.raises(ConfigError, match="107"):
        recorder.link.listen(tmp_path, "gateway")
    await recorder.link.close("")


async def test_closing_removes_the_socket_file_and_no_descriptor_stays(tmp_path: Path):
    async def once() -> None:
        pair = Pair(tmp_path)
        await pair.up()
        await pair.close()
        await asyncio.sleep(0)

    await once()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        await once()
    assert list(tmp_path.iterdir()) == []
    assert len(os.listdir("/proc/self/fd")) <= before
