"""Real sockets between two links of one process."""

import asyncio
import logging
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from socket import AF_UNIX
from socket import socket as StreamSocket  # noqa: N812
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq

from shared.errors import CodecError, ConfigError
from shared.link import dialer as dialer_module
from shared.link import link as link_module
from shared.link.dialer import TURN_S
from shared.link.peer import SILENCE_S, Peer
from shared.process.log import MAX_PEER_TEXT, peer_text
from shared.process.metrics import BAD_MESSAGES, LINK_ROUND_TRIP, PEERS_REFUSED
from shared.wire.codec import MAX_HEADER_BYTES, Array, encode
from shared.wire.messages import (
    MAX_REASON_CHARS,
    PROTOCOL_MAJOR,
    PROTOCOL_MINOR,
    Accepted,
    Bye,
    Cancel,
    Heartbeat,
    Hello,
    Message,
    Overview,
    Refused,
    RequestKey,
    State,
    Tokens,
)
from shared.wire.token_arrays import TokenArrays
from tests.shared.recorder import TIMEOUT_S, Recorder, got

EVIL: Any = "a\r\nFORGED LINE \x1b[31m\u2028"


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
async def pair(tmp_path: Path) -> AsyncIterator[Pair]:
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
    pair.lower.link.send_status(only_changes=True)
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
    assert down.is_explained
    pair.lower = Recorder("tokenizer", "t1")
    pair.lower.link.listen(pair.directory, "gateway")
    assert (await got(pair.upper.ups)).hello.instance == "t1"


async def test_a_link_that_closes_takes_no_more_messages(pair: Pair):
    down, _ = await pair.up()
    down.send(Cancel([RequestKey("r", 1)]))
    await pair.lower.link.close("done")
    assert pair.lower.messages.empty()


async def test_a_service_that_broke_is_lost_to_its_peers(pair: Pair):
    down, _ = await pair.up()
    await pair.lower.link.close("broken", is_planned=False)
    assert await got(pair.upper.downs) == (down, "disconnected")
    assert not down.is_explained


async def test_a_service_with_one_peer_dials_the_next_after_its_end(tmp_path: Path):
    upper = Recorder("worker", "w0")
    upper.link.dial("scheduler", tmp_path, takes_one=True)
    running = asyncio.create_task(upper.link.run())
    first, second = Recorder("scheduler", "s0"), Recorder("scheduler", "s1")
    first.link.listen(tmp_path, "worker")
    assert (await got(upper.ups)).hello.instance == "s0"
    second.link.listen(tmp_path, "worker")
    await asyncio.sleep(5 * TURN_S)
    assert second.ups.empty()
    await first.link.close("done")
    assert (await got(upper.ups)).hello.instance == "s1"
    running.cancel()
    for each in (upper, second):
        await each.link.close("test over")


async def test_a_peer_that_was_refused_gets_the_reason_and_no_peer_is_up(tmp_path: Path, caplog):
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
        encode(Hello(PROTOCOL_MAJOR, 0, "gateway", EVIL)),
        encode(Hello(PROTOCOL_MAJOR, 0, "gateway", "x" * 33)),
        encode(Hello(PROTOCOL_MAJOR, 0, "gateway", "")),
        encode(Hello(PROTOCOL_MAJOR, 0, EVIL, "g")),
    ],
)
async def test_a_first_message_that_is_no_good_hello_is_refused(pair: Pair, raw, first, caplog):
    await pair.up()
    raw.send_multipart(first)
    reply = await asyncio.to_thread(raw.recv_multipart)
    assert b"\x04" in reply[0][:3]  # the tag of Refused
    assert pair.lower.ups.empty()
    assert_nothing_is_forged(caplog)


def assert_nothing_is_forged(caplog) -> None:
    for line in caplog.messages:
        assert line.isprintable()
        assert len(line) < 1000


@pytest.mark.parametrize("message", [Refused(EVIL * 100), Bye(EVIL * 100)])
async def test_texts_of_lower_services_cannot_forge_log_lines(
    tmp_path: Path, caplog, message: Message
):
    caplog.set_level(logging.INFO)
    context = zmq.Context()
    router = context.socket(zmq.ROUTER)
    router.bind(f"ipc://{tmp_path / 'tokenizer-t0.sock'}")
    upper = Recorder("gateway", "g0")
    upper.link.dial("tokenizer", tmp_path)
    running = asyncio.create_task(upper.link.run())
    route, *_ = await asyncio.to_thread(router.recv_multipart)
    if isinstance(message, Bye):
        router.send_multipart([route, *encode(Hello(PROTOCOL_MAJOR, 0, "tokenizer", "t0"))])
    router.send_multipart([route, *encode(message)])
    async with asyncio.timeout(TIMEOUT_S):
        while "FORGED" not in caplog.text:
            await asyncio.sleep(0.01)
    assert_nothing_is_forged(caplog)
    running.cancel()
    await upper.link.close("test over")
    context.destroy(linger=0)


async def test_texts_of_upper_services_cannot_forge_log_lines(pair: Pair, raw, caplog):
    caplog.set_level(logging.INFO)
    await pair.up()
    raw.send_multipart(encode(Hello(PROTOCOL_MAJOR, 0, "gateway", "g1")))
    peer = await got(pair.lower.ups)
    raw.send_multipart(encode(Heartbeat(State.NOT_READY, EVIL * 100, 0, 0)))
    raw.send_multipart(encode(Bye(EVIL * 100)))
    await got(pair.lower.downs)
    assert peer.status.reason.startswith("a\\r\\nFORGED")
    assert_nothing_is_forged(caplog)
    assert len(peer.status.reason) < 1000


def test_escaped_texts_of_a_peer_stay_within_the_wire_limit():
    assert len(peer_text("\U000e0001" * 5000)) <= MAX_PEER_TEXT < MAX_REASON_CHARS


async def test_an_overview_without_a_valid_scheduler_ends_the_peer_that_sent_it(pair: Pair, raw):
    await pair.up()
    raw.send_multipart(encode(Hello(PROTOCOL_MAJOR, 0, "gateway", "g1")))
    peer = await got(pair.lower.ups)
    overview = Overview(EVIL, 0, 0, 0, 0, 0)
    raw.send_multipart(encode(Heartbeat(State.READY, "", 0, 0, overview=overview)))
    assert (await got(pair.lower.downs))[0] is peer


@pytest.mark.parametrize("garbage", [[b"\xc1", b"x"], [b""]])
async def test_garbage_ends_the_peer_that_sent_it_and_harms_no_other(pair: Pair, raw, garbage):
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
    minor = PROTOCOL_MINOR + 1
    await pair.up()
    raw.send_multipart(encode(Hello(PROTOCOL_MAJOR, minor, "gateway", "g1")))
    assert (await got(pair.lower.ups)).hello.instance == "g1"
    assert f"gateway g1 is up, with protocol {PROTOCOL_MAJOR}.{minor}" in caplog.messages
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
    """Connections come and go, so the kernel reuses their descriptors."""
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


async def test_sending_to_a_peer_that_just_died_raises_nothing_and_on_down_is_called(
    tmp_path: Path,
):
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


HEARTBEAT = encode(Heartbeat(State.READY, "", 0, 0))


async def test_messages_that_are_not_read_wait_with_the_peer_that_sent_them(pair: Pair, raw):
    await pair.up()
    raw.send_multipart(encode(Hello(PROTOCOL_MAJOR, 0, "gateway", "flood")))
    await got(pair.lower.ups)
    num_sent, limit = 0, 200_000
    while num_sent < limit and raw.poll(500, zmq.POLLOUT):  # our loop does not turn meanwhile
        raw.send_multipart(HEARTBEAT)
        num_sent += 1
    assert num_sent < limit / 4


@pytest.mark.seconds
async def test_a_peer_that_floods_us_delays_neither_others_nor_the_news_of_a_loss(pair: Pair):
    down, up = await pair.up()
    path = str(pair.directory / "tokenizer-t0.sock")
    command = (sys.executable, "-m", "tests.shared.link.flooding_peer", path)
    root = Path(__file__).parents[3]
    processes = {
        name: await asyncio.create_subprocess_exec(*command, name, cwd=root) for name in ("a", "b")
    }
    peers = {peer.hello.instance: peer for peer in [await got(pair.lower.ups) for _ in processes]}
    for number in range(20):
        down.send(Cancel([RequestKey("r", number)]))
        assert (await got(pair.lower.messages))[0] is up
        up.send(Cancel([RequestKey("r", number)]))
        assert (await got(pair.upper.messages))[0] is down
    for name, process in processes.items():
        process.kill()
        assert await got(pair.lower.downs) == (peers[name], "disconnected")
        await process.wait()


async def test_all_that_a_peer_sent_arrives_before_its_loss(pair: Pair, raw):
    await pair.up()
    raw.send_multipart(encode(Hello(PROTOCOL_MAJOR, 0, "gateway", "g1")))
    for number in range(500):
        raw.send_multipart(encode(Cancel([RequestKey("r", number)])))
    raw.close(linger=TIMEOUT_S * 1000)
    peer = await got(pair.lower.ups)
    assert await got(pair.lower.downs) == (peer, "disconnected")
    assert pair.lower.messages.qsize() == 500


@pytest.mark.seconds
async def test_a_peer_that_stalls_is_kept_and_one_that_hangs_is_lost(tmp_path: Path):
    below = Recorder("tokenizer", "t0")
    below.link.listen(tmp_path, "gateway")
    running = asyncio.create_task(below.link.run())
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.shared.link.stalling_peer", str(tmp_path)),
        cwd=Path(__file__).parents[3],
    )
    peer = await got(below.ups)
    await asyncio.sleep(3 * SILENCE_S)
    assert below.downs.empty()
    process.send_signal(signal.SIGSTOP)
    assert await got(below.downs) == (peer, "silent for 2 s")
    process.send_signal(signal.SIGCONT)
    assert (await got(below.ups)).stood_still
    process.kill()
    await process.wait()
    running.cancel()
    await below.link.close("test over")


async def test_while_we_stand_still_ourselves_no_peer_counts_as_silent(pair: Pair, monkeypatch):
    monkeypatch.setattr(link_module, "HEARTBEAT_S", 0.05)
    monkeypatch.setattr(link_module, "SILENCE_S", 0.5)
    monkeypatch.setattr(link_module, "STILL_S", 0.4)
    await pair.up()
    await asyncio.sleep(0.1)
    assert not pair.lower.link.stood_still
    for _ in range(2):
        time.sleep(0.7)  # noqa: ASYNC251 - our loop must not turn
        assert pair.lower.link.stood_still, "before any heartbeat has been seen to be late"
        await asyncio.sleep(0.1)
        assert pair.lower.link.stood_still, "a moment later"
    assert pair.upper.downs.empty()
    assert pair.lower.downs.empty()
    await asyncio.sleep(0.6)
    assert not pair.lower.link.stood_still


@pytest.mark.parametrize(("still_s", "has_outlived"), [(None, False), (-5.0, False), (0.1, True)])
async def test_a_service_that_stalled_says_so_when_it_is_back(
    pair: Pair, still_s: float | None, has_outlived: bool
):
    """The gateway's stall ended ``still_s`` after its loss."""
    _, gateway = await pair.up()
    pair.lower.link.drop(gateway, "silent for 2 s")
    if still_s is not None:
        pair.upper.link._stood_still_s = time.monotonic() + still_s
        await asyncio.sleep(max(0.0, still_s))
    tokenizer, gateway = await pair.up()
    assert gateway.stood_still == has_outlived
    assert not tokenizer.stood_still, "it never has"
    assert (gateway.hello.still_s is None) == (still_s is None)


async def test_a_hello_of_the_minor_before_says_nothing_of_stalls(pair: Pair, raw):
    await pair.up()
    hello, arrays = msgspec.msgpack.decode(encode(Hello(PROTOCOL_MAJOR, 4, "gateway", "old"))[0])
    del hello[1 + Hello.__struct_fields__.index("still_s") :]  # behind the tag
    raw.send(msgspec.msgpack.encode([hello, arrays]))
    peer = await got(pair.lower.ups)
    assert (peer.hello.instance, peer.hello.still_s, peer.stood_still) == ("old", None, False)


async def test_a_hello_that_lies_unread_while_we_stand_still_is_read(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(dialer_module, "GREETING_LOOKS", 2)
    lower, upper = Recorder("tokenizer", "t0"), Recorder("gateway", "g0")
    lower.link.listen(tmp_path, "gateway")
    upper.link.dial("tokenizer", tmp_path)
    running = asyncio.create_task(upper.link.run())
    while not upper.link._dialers[0]._connections:
        await asyncio.sleep(0)
    time.sleep(3 * TURN_S)  # noqa: ASYNC251 - our loop must not turn
    await got(upper.ups)
    assert upper.downs.empty()
    running.cancel()
    await upper.link.close("test over")
    await lower.link.close("test over")


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
