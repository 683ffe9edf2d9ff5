"""Links over tcp: names and their addresses, keys, and strangers at the port."""

import asyncio
import contextlib
import socket
import struct
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import zmq

from cli.keys import write_keys
from shared.errors import ConfigError
from shared.link.hosts import tcp as tcp_hosts
from shared.link.hosts.tcp import TcpHosts
from shared.link.keys import Keys, load_keys, public_path
from shared.link.peer import SILENCE_S, Peer
from shared.link.tcp import BACKLOG
from shared.process.metrics import PEERS_REFUSED
from shared.wire.codec import MAX_FRAME_BYTES, encode
from shared.wire.messages import PROTOCOL_MAJOR, Cancel, Hello, Message, RequestKey, ServiceName
from tests.shared.recorder import TIMEOUT_S, Recorder, got

CANCEL = Cancel([RequestKey("r", 1)])
Mesh = contextlib.AsyncExitStack


@pytest.fixture
async def mesh() -> AsyncIterator[Mesh]:
    """Ends the links that ``start`` runs."""
    async with contextlib.AsyncExitStack() as stack:
        yield stack


@pytest.fixture
def names(monkeypatch) -> dict[str, list[str]]:
    """A resolver with these names only; a test may change them. It is queried continuously."""
    known: dict[str, list[str]] = {}

    async def getaddrinfo(_: object, host: str, port: int, **options: object) -> list[tuple]:
        if host not in known:
            raise socket.gaierror(socket.EAI_NONAME, "no such name")
        return [(socket.AF_INET, 0, 6, "", (address, port)) for address in known[host]]

    monkeypatch.setattr(asyncio.BaseEventLoop, "getaddrinfo", getaddrinfo)
    monkeypatch.setattr(tcp_hosts, "LOOKUP_S", 0.02)
    return known


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_keys(tmp_path / "keys")
    return tmp_path / "keys"


def keys_of(folder: Path, service: ServiceName) -> Keys:
    keys = load_keys(folder, service)
    assert keys is not None
    return keys


def start(mesh: Mesh, recorder: Recorder) -> None:
    running = asyncio.create_task(recorder.link.run())

    async def stop() -> None:
        running.cancel()
        await recorder.link.close("test over")

    mesh.push_async_callback(stop)


async def lower(mesh: Mesh, place: Path, tcp: str = "tcp://127.0.0.1:0", **options) -> Recorder:
    """A tokenizer that gateways reach by ``address_of``; ``place`` names it and its directory."""
    recorder = Recorder("tokenizer", place.name, **options)
    place.mkdir(exist_ok=True)
    start(mesh, recorder)
    recorder.link.listen(place, "gateway", tcp=tcp)
    return recorder


async def upper(mesh: Mesh, nowhere: Path, *tcp: str, **options) -> Recorder:
    """A gateway that finds tokenizers by tcp only."""
    recorder = Recorder("gateway", "g0", **options)
    recorder.link.dial("tokenizer", nowhere / "nothing here", tcp=tcp)
    start(mesh, recorder)
    return recorder


def address_of(recorder: Recorder) -> str:
    return recorder.link.addresses[-1]


def port_of(recorder: Recorder) -> int:
    return int(address_of(recorder).rpartition(":")[2])


async def both_ways(one: Recorder, other: Recorder, to_other: Peer, to_one: Peer) -> None:
    to_other.send(CANCEL)
    to_one.send(CANCEL)
    assert (await got(one.messages))[1] == (await got(other.messages))[1] == CANCEL


async def until_refused(num: float) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while num_refused() < num:
            await asyncio.sleep(0.01)


def num_refused() -> float:
    return PEERS_REFUSED._value.get()


# --- addresses ------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]", "*", "lo"])
async def test_messages_pass_both_ways_over_tcp(mesh: Mesh, tmp_path: Path, host: str):
    below = await lower(mesh, tmp_path / "t0", f"tcp://{host}:0")
    dialled = "[::1]" if host == "[::1]" else "127.0.0.1"
    above = await upper(mesh, tmp_path, f"tcp://{dialled}:{port_of(below)}")
    await both_ways(above, below, await got(above.ups), await got(below.ups))


async def test_a_tcp_peer_that_closes_is_a_loss_at_once(mesh: Mesh, tmp_path: Path):
    below = await lower(mesh, tmp_path / "t0")
    stranger = zmq.Context()
    dealer = stranger.socket(zmq.DEALER)
    dealer.connect(address_of(below))
    dealer.send_multipart(encode(Hello(PROTOCOL_MAJOR, 0, "gateway", "g0")))
    peer = await got(below.ups)
    dealer.close(linger=0)
    assert await got(below.downs) == (peer, "disconnected")
    stranger.destroy(linger=0)


async def test_every_address_of_a_name_has_its_connection(mesh: Mesh, tmp_path: Path, names):
    first = await lower(mesh, tmp_path / "t0")
    second = await lower(mesh, tmp_path / "t1", f"tcp://127.0.0.2:{port_of(first)}")
    names["tokenizer"] = ["127.0.0.1", "127.0.0.2"]
    above = await upper(mesh, tmp_path, f"tcp://tokenizer:{port_of(first)}")
    assert {(await got(above.ups)).hello.instance for _ in range(2)} == {"t0", "t1"}
    assert first.link.peers
    assert second.link.peers


async def test_an_address_that_a_name_gains_is_dialled_and_one_it_loses_stays_connected(
    mesh: Mesh, tmp_path: Path, names
):
    first = await lower(mesh, tmp_path / "t0")
    await lower(mesh, tmp_path / "t1", f"tcp://127.0.0.2:{port_of(first)}")
    names["tokenizer"] = ["127.0.0.1"]
    above = await upper(mesh, tmp_path, f"tcp://tokenizer:{port_of(first)}")
    peer = await got(above.ups)
    assert peer.hello.instance == "t0"
    names["tokenizer"] = ["127.0.0.2"]
    assert (await got(above.ups)).hello.instance == "t1"
    await both_ways(above, first, peer, await got(first.ups))
    assert above.downs.empty()


async def test_a_lookup_that_fails_is_logged_once_and_ends_nothing(
    mesh: Mesh, tmp_path: Path, names, caplog
):
    below = await lower(mesh, tmp_path / "t0")
    names["tokenizer"] = ["127.0.0.1"]
    above = await upper(mesh, tmp_path, f"tcp://tokenizer:{port_of(below)}")
    peer = await got(above.ups)
    del names["tokenizer"]
    async with asyncio.timeout(TIMEOUT_S):
        while "no lookup" not in caplog.text:
            await asyncio.sleep(0.01)
    await asyncio.sleep(10 * tcp_hosts.LOOKUP_S)
    await both_ways(above, below, peer, await got(below.ups))
    assert above.downs.empty()
    assert caplog.text.count("no lookup") == 1


async def test_one_process_behind_two_addresses_is_one_peer(mesh: Mesh, tmp_path: Path, names):
    below = Recorder("tokenizer", "t0")
    below.link.listen(tmp_path, "gateway", tcp="tcp://*:0")
    running = asyncio.create_task(below.link.run())
    names["tokenizer"] = ["127.0.0.1", "127.0.0.2"]
    before = num_refused()
    above = await upper(mesh, tmp_path, f"tcp://tokenizer:{port_of(below)}")
    await both_ways(above, below, await got(above.ups), await got(below.ups))
    await until_refused(before + 1)
    await asyncio.sleep(2)  # enough for three more attempts
    assert (above.ups.qsize(), below.ups.qsize()) == (0, 0)
    assert num_refused() == before + 1, "the second address is left alone"
    port = port_of(below)
    running.cancel()
    await below.link.close("gone")
    await lower(mesh, tmp_path / "t1", f"tcp://127.0.0.2:{port}")
    assert (await got(above.ups)).hello.instance == "t1"


async def test_dialling_an_address_without_a_listener_is_logged_once_and_ends_with_the_link(
    tmp_path: Path, caplog
):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    above = Recorder("gateway", "g0")
    above.link.dial("tokenizer", tmp_path, tcp=[f"tcp://127.0.0.1:{port}"])
    running = asyncio.create_task(above.link.run())
    await asyncio.sleep(1)  # several attempts
    running.cancel()
    await asyncio.wait_for(above.link.close("test over"), TIMEOUT_S)
    assert caplog.text.count(f"tcp://127.0.0.1:{port}: no connection") == 1


async def test_a_port_in_use_is_a_config_error(mesh: Mesh, tmp_path: Path):
    below = await lower(mesh, tmp_path / "t0")
    with pytest.raises(ConfigError, match="in use"):
        await lower(mesh, tmp_path / "t1", address_of(below))


# --- keys -----------------------------------------------------------------------------------------


async def test_with_the_right_keys_messages_pass(mesh: Mesh, tmp_path: Path, folder: Path):
    below = await lower(mesh, tmp_path / "t0", keys=keys_of(folder, "tokenizer"))
    above = await upper(mesh, tmp_path, address_of(below), keys=keys_of(folder, "gateway"))
    await both_ways(above, below, await got(above.ups), await got(below.ups))


class Guarded:
    """A tokenizer with keys, and a gateway that is its peer."""

    def __init__(self, below: Recorder, above: Recorder, peers: tuple[Peer, Peer]) -> None:
        self.below = below
        self.address = address_of(below)
        self._above = above
        self._peers = peers
        self._num_refused = num_refused()

    async def refuses(self) -> None:
        """A connection was refused, and the two peers never noticed."""
        await until_refused(self._num_refused + 1)
        await both_ways(self._above, self.below, *self._peers)
        assert self.below.ups.empty()
        assert self.below.downs.empty()
        assert self._above.downs.empty()


@pytest.fixture
async def guarded(mesh: Mesh, tmp_path: Path, folder: Path) -> Guarded:
    below = await lower(mesh, tmp_path / "t0", keys=keys_of(folder, "tokenizer"))
    above = await upper(mesh, tmp_path, address_of(below), keys=keys_of(folder, "gateway"))
    return Guarded(below, above, (await got(above.ups), await got(below.ups)))


@contextlib.contextmanager
def stranger(address: str, keys: Keys | None, first: Message):
    """Connects with these keys and sends ``first``."""
    context = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    if keys:
        dealer.curve_secretkey, dealer.curve_publickey = keys.secret, keys.public
        dealer.curve_serverkey = keys.public_of("tokenizer")
    dealer.reconnect_ivl = -1
    dealer.connect(address)
    with contextlib.suppress(zmq.Again):  # it may be refused before it has sent anything
        dealer.send_multipart(encode(first), zmq.DONTWAIT)
    yield dealer
    context.destroy(linger=0)


def hello(service: ServiceName, major: int = PROTOCOL_MAJOR) -> Hello:
    return Hello(major, 0, service, "stranger")


async def test_a_key_of_another_role_is_refused(guarded: Guarded, folder: Path, caplog):
    with stranger(guarded.address, keys_of(folder, "worker"), hello("gateway")):
        await guarded.refuses()
    assert "the handshake failed: the key is not accepted" in caplog.text


async def test_an_unknown_key_is_refused(guarded: Guarded, folder: Path, tmp_path: Path):
    write_keys(tmp_path / "other keys")
    ours, other = keys_of(folder, "gateway"), keys_of(tmp_path / "other keys", "gateway")
    with stranger(
        guarded.address,
        Keys("gateway", other.secret, {**ours.publics, "gateway": other.public}, folder),
        hello("gateway"),
    ):
        await guarded.refuses()


async def test_a_key_of_another_set_is_refused_and_the_reason_names_that(
    guarded: Guarded, tmp_path: Path, caplog
):
    write_keys(tmp_path / "other keys")
    with stranger(guarded.address, keys_of(tmp_path / "other keys", "gateway"), hello("gateway")):
        await guarded.refuses()
    assert "keys on one side only, or of two sets" in caplog.text


async def test_a_hello_of_another_role_than_the_key_is_refused(
    guarded: Guarded, folder: Path, caplog
):
    with stranger(guarded.address, keys_of(folder, "gateway"), hello("worker")):
        await guarded.refuses()
    assert "a gateway key, but Hello names worker" in caplog.text


async def test_a_peer_without_a_key_gets_no_connection_where_keys_are_needed(guarded: Guarded):
    with stranger(guarded.address, None, hello("gateway")):
        await guarded.refuses()


async def test_an_older_major_is_refused_with_both_numbers(guarded: Guarded, folder: Path, caplog):
    first = hello("gateway", PROTOCOL_MAJOR - 1)
    with stranger(guarded.address, keys_of(folder, "gateway"), first) as dealer:
        await guarded.refuses()
        reply = await asyncio.to_thread(dealer.recv_multipart)
    assert f"protocol {PROTOCOL_MAJOR - 1} is not {PROTOCOL_MAJOR}".encode() in reply[0]


SIZE_OF_TOO_MUCH = struct.pack(">Q", MAX_FRAME_BYTES + 1)
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(16) + bytes(32)


@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 100, GREETING])
async def test_bytes_that_are_no_handshake_are_refused(guarded: Guarded, sent: bytes):
    with socket.create_connection(("127.0.0.1", port_of(guarded.below))) as raw:
        with contextlib.suppress(OSError):  # it may be disconnected first
            raw.sendall(sent)
            raw.shutdown(socket.SHUT_WR)
        await guarded.refuses()


async def test_a_scanner_is_logged_once_and_counted_each_time(guarded: Guarded, caplog):
    before = num_refused()
    for number in range(20):
        socket.create_connection(("127.0.0.1", port_of(guarded.below))).close()
        await until_refused(before + number + 1)
    await guarded.refuses()
    assert num_refused() == before + 20
    # A peer gone early has no address; otherwise each line has another remote or reason.
    assert caplog.text.count(": refused ") <= 2


async def test_a_frame_above_the_limit_ends_only_its_sender(guarded: Guarded, folder: Path):
    with stranger(guarded.address, keys_of(folder, "gateway"), hello("gateway")) as dealer:
        peer = await got(guarded.below.ups)
        dealer.send(bytes(MAX_FRAME_BYTES + 1))
        down, reason = await got(guarded.below.downs)
        assert down == peer
        assert reason in ("disconnected", f"silent for {SILENCE_S:g} s"), "it sends no heartbeats"


async def test_a_frame_that_claims_too_much_before_hello_is_refused(mesh: Mesh, tmp_path: Path):
    below = await lower(mesh, tmp_path / "t0")
    before = num_refused()
    ready = b"\x04\x19\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"
    with socket.create_connection(("127.0.0.1", port_of(below))) as raw:
        raw.sendall(GREETING + ready + b"\x02" + SIZE_OF_TOO_MUCH)
        await until_refused(before + 1)


async def test_a_server_without_keys_is_not_spoken_to(
    mesh: Mesh, tmp_path: Path, folder: Path, caplog
):
    below = await lower(mesh, tmp_path / "t0")
    above = await upper(mesh, tmp_path, address_of(below), keys=keys_of(folder, "gateway"))
    before = num_refused()
    await until_refused(before + 3)
    assert above.ups.empty()
    assert below.ups.empty()
    assert caplog.text.count("is not who it should be") == 1


async def test_a_server_with_another_secret_is_not_spoken_to(
    mesh: Mesh, tmp_path: Path, folder: Path, caplog
):
    write_keys(tmp_path / "other keys")
    below = await lower(mesh, tmp_path / "t0", keys=keys_of(tmp_path / "other keys", "tokenizer"))
    above = await upper(mesh, tmp_path, address_of(below), keys=keys_of(folder, "gateway"))
    before = num_refused()
    await until_refused(before + 3)
    assert above.ups.empty()
    assert below.ups.empty()
    assert caplog.text.count("is not who it should be") == 1


async def test_a_key_that_is_missing_is_a_config_error_with_its_file(
    mesh: Mesh, tmp_path: Path, folder: Path
):
    public_path(folder, "gateway").unlink()
    with pytest.raises(ConfigError, match=r"gateway\.key"):
        await lower(mesh, tmp_path / "t0", keys=keys_of(folder, "tokenizer"))


async def test_the_backlog_is_as_long_as_that_of_the_gateway() -> None:
    hosts = TcpHosts(None)
    listening = hosts.listen("tcp://127.0.0.1:0", lambda *_: None, lambda *_: None, "gateway")
    try:
        assert listening._socket._zmq.get(zmq.BACKLOG) == BACKLOG
    finally:
        listening.close()
        hosts.close()
