"""A worker's ends of the links: to schedulers, and to other workers that lie or are lost."""

import asyncio
import socket
import zlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from services.worker.moves import links
from services.worker.moves.addition import INBOX_BYTES
from services.worker.moves.links import role_of
from shared.errors import CodecError, ConfigError
from shared.link.address import MAX_PATH_BYTES, socket_path
from shared.wire.messages import (
    MOVES_MINOR,
    PROTOCOL_MAJOR,
    Arrived,
    Discard,
    Hello,
    Inbox,
    Meet,
    Part,
    Push,
    Pushed,
    Take,
)
from tests.mesh.arena_parts import FakePeer
from tests.services.worker.moves.worker import (
    MovingWorker,
    key_of,
    plan_of,
    random_ids,
    scheduler,
    until,
    working,
)

Two = tuple[MovingWorker, MovingWorker]


@pytest.fixture
async def one(checkpoint: Path, tmp_path: Path) -> AsyncIterator[MovingWorker]:
    async with working(checkpoint, tmp_path, "b") as worker:
        yield worker


@pytest.fixture
async def two(checkpoint: Path, tmp_path: Path) -> AsyncIterator[Two]:
    """The first has two different blocks, and has met the second."""
    async with working(checkpoint, tmp_path, "a") as a, working(checkpoint, tmp_path, "b") as b:
        await a.prefill(random_ids(37, 150), 37, [0, 1, 2], 0, 0)
        a.meet(b)
        yield a, b


async def test_an_inbox_follows_each_attach(two: Two) -> None:
    a, b = two
    found = []
    for worker in two:
        worker.moves.on_attach(worker.home)
        found.append(worker.inbox)
    assert found[0] == found[1]
    assert found[0].block_bytes == len(a.bytes_of(0))
    assert found[0].num_blocks == INBOX_BYTES // found[0].block_bytes
    assert (found[0].address, found[0].role) == ("", "both")
    old = scheduler(MOVES_MINOR - 1)
    b.moves.on_attach(old)
    assert not old.got


async def test_other_folders_and_settings_are_told_apart(checkpoint: Path, tmp_path: Path) -> None:
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
    tcp = {"kv_transfer_address": "tcp://127.0.0.1:0", "kv_cache_dtype": "int8"}
    async with (
        working(checkpoint, tmp_path / "here", "a") as a,
        working(checkpoint, tmp_path / "there", "b", **tcp) as b,
    ):
        here, there = a.inbox, b.inbox
        assert here.location != there.location
        assert here.layout != there.layout
        assert there.address.startswith("tcp://127.0.0.1:")
        assert not there.address.endswith(":0")


async def test_a_role_without_moves_is_told(
    checkpoint: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with working(checkpoint, tmp_path, "a", kv_transfer=False, worker_role="prefill"):
        pass
    assert "worker-role: prefill has no effect" in caplog.text


async def test_memory_for_blocks_is_planned(one: MovingWorker) -> None:
    (addition,) = one.engine.additions
    (num,) = addition.num_bytes(1).values()
    inbox = one.moves._inbox
    assert num == (2 * inbox.num_blocks + inbox.num_guests) * inbox.block_bytes


@pytest.mark.parametrize(
    ("row", "why"),
    [
        (Push(key_of(0), 64, "b"), "block 64 that moves; the cache has 64"),
        (Take(key_of(0), 2**31 - 1), "block 2147483647 that moves"),
        (Push(key_of(0), 0, "c"), "a push to worker c, which this one has not met"),
        (Take(key_of(0), 0), "no block 0000"),
        (Take(key_of(0), 0, Part(key_of(0), 1, 0)), "state 0 that moves; there are 0"),
    ],
)
async def test_hostile_rows(two: Two, row: Any, why: str) -> None:
    with pytest.raises(CodecError, match=why):
        two[0].moves.check(plan_of(row), [])


@pytest.mark.parametrize(
    ("meet", "why"),
    [
        (Meet("../w"), "a worker whose name"),
        (Meet("w", "tcp://*:5"), "the address of worker w: must be"),
        (Meet("w", "ipc:///etc"), "the address of worker w: must be"),
    ],
)
async def test_hostile_meetings(one: MovingWorker, meet: Meet, why: str) -> None:
    with pytest.raises(CodecError, match=why):
        one.moves.takes(one.home, meet)


async def test_a_block_is_taken_once(two: Two) -> None:
    a, b = two
    await a.push(b, [0, 1])
    await b.arrived(2)
    assert b.num_full == 2
    await b.run(Take(key_of(0), 5), Discard(key_of(1)), Discard(key_of(1)))
    assert b.num_full == 0
    for row in (Take(key_of(0), 6), Take(key_of(1), 6)):
        with pytest.raises(CodecError, match="in the inbox"):
            b.moves.check(plan_of(row), [])


async def test_a_key_that_comes_twice_is_there_once(two: Two) -> None:
    """After it was taken, it may come again."""
    a, b = two
    for block in (5, 6):
        for _ in range(2):
            await a.push(b, [0])
        await b.arrived(2)
        assert b.num_full == 1
        await b.take([block])
    assert b.bytes_of(5) == b.bytes_of(6) == a.bytes_of(0)


def pushed(worker: MovingWorker, *blocks: np.ndarray) -> tuple[Pushed, tuple[np.ndarray, ...]]:
    keys = [key_of(number) for number in range(len(blocks))]
    return Pushed(keys, [zlib.crc32(each.data) for each in blocks]), blocks


def odd_pushes(worker: MovingWorker) -> dict[str, tuple[Pushed, tuple[np.ndarray, ...]]]:
    block: np.ndarray = np.ones(worker.moves._inbox.block_bytes, np.uint8)
    key, crc = key_of(0), zlib.crc32(block.data)
    num = worker.moves._inbox.num_blocks + 1
    return {
        "size": pushed(worker, block, block[:-1]),
        "checksum": (Pushed([key], [crc ^ 1]), (block,)),
        "count of checksums": (Pushed([key], []), (block,)),
        "count of blocks": (Pushed([key, key], [crc, crc]), (block,)),
        "count of parts": (
            Pushed([key, key], [crc, crc], "", [Part(key, 1, 0, 1)]),
            (block, block),
        ),
        "room": (Pushed(num * [key], num * [crc]), num * (block,)),
    }


ODD = ("size", "checksum", "count of checksums", "count of blocks", "count of parts", "room")


@pytest.mark.parametrize("name", ODD)
async def test_a_bad_push_ends_its_link_alone(two: Two, name: str) -> None:
    """A later push goes over a new one."""
    a, b = two
    await a.push(b, [0])
    await b.arrived(1)
    (peer,) = receiver_of(b).peers
    a.moves._links.send("b", *odd_pushes(b)[name])
    await until(lambda: peer not in receiver_of(b).peers)
    assert b.num_full == 1
    await until(lambda: "b" not in a.moves._links._senders)
    await a.push(b, [1], first=1)
    await b.arrived(1)
    await b.take([7, 8])
    assert (b.bytes_of(7), b.bytes_of(8)) == (a.bytes_of(0), a.bytes_of(1))


def receiver_of(worker: MovingWorker) -> Any:
    receiver = worker.moves._links.receiver
    assert receiver is not None
    return receiver.link


async def test_a_block_with_another_checksum_leaves_its_place_free(one: MovingWorker) -> None:
    odd = odd_pushes(one)["checksum"]
    inbox = one.moves._inbox
    for _ in range(2):
        one.moves.on_pushed(scheduler(), odd[0], odd[1])
    assert inbox._num_expected == 2
    await until(lambda: inbox._num_expected == 0)
    assert (one.num_full, one.home.take(Arrived)) == (0, [])


async def test_workers_of_old_are_refused(one: MovingWorker) -> None:
    hello = Hello(PROTOCOL_MAJOR, MOVES_MINOR - 1, "worker", "old")
    assert "knows of no moves" in (receiver_of(one).refusal(hello, "worker") or "")


@pytest.mark.parametrize("is_killed", [False, True])
async def test_a_worker_that_is_gone_takes_no_blocks(
    checkpoint: Path, tmp_path: Path, is_killed: bool
) -> None:
    """Its successor of the same name does, once they have met."""
    async with working(checkpoint, tmp_path, "a") as a:
        await a.prefill(random_ids(37, 150), 37, [0, 1, 2], 0, 0)
        async with working(checkpoint, tmp_path, "b") as b:
            a.meet(b)
            await a.push(b, [0])
            await b.arrived(1)
            if is_killed:
                await receiver_of(b).close("killed", is_planned=False)
        await until(lambda: "b" not in a.moves._links._senders)
        await a.push(b, [0])
        async with working(checkpoint, tmp_path, "b") as b:
            a.moves.on_attach(a.home)
            a.meet(b)
            await a.push(b, [1], first=1)
            await b.arrived(1)
            await b.take([7], first=1)
            assert b.bytes_of(7) == a.bytes_of(1)


async def test_the_next_scheduler_finds_an_empty_inbox(two: Two) -> None:
    a, b = two
    await a.push(b, [0])
    await b.arrived(1)
    b.leave(scheduler())
    assert b.inbox.num_blocks == b.moves._inbox.num_blocks
    with pytest.raises(CodecError, match="in the inbox"):
        b.moves.check(plan_of(Take(key_of(0), 0)), [])


async def test_plans_of_a_lost_scheduler_take_and_push_no_more(two: Two) -> None:
    """They are still run, with the blocks that were there."""
    a, b = two
    await a.push(b, [0])
    await b.arrived(1)
    plan = plan_of(Take(key_of(0), 5), Push(key_of(9), 0, "b"))
    b.moves.takes(b.home, Meet("b"))
    b.moves.check(plan, [])
    b.step_thread.submit(b.part.apply, plan, [])
    b.leave(scheduler())
    b.moves.takes(b.home, Meet("b"))
    await b.settle()
    assert b.bytes_of(5) == a.bytes_of(0)
    b.step_thread.submit(b.part.apply, plan_of(Push(key_of(8), 0, "b")), [])
    ((message, _),) = await arrival(b)
    assert message.keys == [key_of(8)]


async def arrival(worker: MovingWorker) -> Any:
    await until(lambda: any(isinstance(each, Arrived) for each, _ in worker.home.got))
    return worker.home.take(Arrived)


async def test_links_of_a_lost_scheduler_close(two: Two) -> None:
    a, b = two
    await a.push(b, [0])
    await b.arrived(1)
    assert receiver_of(b).peers
    a.leave(scheduler())
    await until(lambda: not receiver_of(b).peers)
    with pytest.raises(CodecError, match="not met"):
        a.moves.check(plan_of(Push(key_of(0), 0, "b")), [])


async def test_blocks_without_a_scheduler_are_dropped(one: MovingWorker) -> None:
    block: np.ndarray = np.ones(one.moves._inbox.block_bytes, np.uint8)
    for home in (None, scheduler(MOVES_MINOR - 1)):
        one.home = home
        one.moves.on_pushed(scheduler(), *pushed(one, block))
        await until(lambda: one.moves._inbox._num_expected == 0)
        assert one.num_full == 0


async def test_a_meeting_of_a_former_scheduler_does_not_count(one: MovingWorker) -> None:
    assert one.moves.takes(scheduler(), Meet("a"))
    assert not one.moves._links.has_met("a")


async def test_a_tcp_address_in_use_ends_the_start(checkpoint: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        async with working(checkpoint, tmp_path, "b", kv_transfer_address=address) as worker:
            assert not worker.home.got
            with pytest.raises(ConfigError, match="kv-transfer-address: cannot listen on tcp"):
                await worker.moves.run()


async def test_a_worker_serves_where_the_path_is_too_long(checkpoint: Path, tmp_path: Path) -> None:
    short = socket_path(tmp_path, "worker", "b", role_of("b"))
    folder = tmp_path / ((MAX_PATH_BYTES - len(bytes(short))) * "x")
    folder.mkdir()
    async with working(checkpoint, folder, "b") as worker:
        assert not worker.home.take(Inbox)
        await asyncio.wait_for(worker.moves.run(), 60)
        await worker.prefill(random_ids(37, 150), 37, [0, 1, 2], 0, 0)


async def test_a_worker_without_moves_takes_no_rows(checkpoint: Path, tmp_path: Path) -> None:
    async with working(checkpoint, tmp_path, "b", kv_transfer=False) as worker:
        worker.moves.clear()
        assert not worker.home.got
        worker.moves.check(plan_of(), [])
        for row in (Discard(key_of(0)), Push(key_of(0), 0, "a"), Take(key_of(0), 0)):
            with pytest.raises(CodecError, match="do not move"):
                worker.moves.check(plan_of(row), [])
        with pytest.raises(CodecError, match="do not move"):
            worker.moves.takes(worker.home, Meet("a"))
        assert not worker.moves.takes(FakePeer(worker.home.hello), Arrived([]))


async def test_blocks_wait_for_a_connection_and_not_for_ever(
    two: Two, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, _ = two
    monkeypatch.setattr(links, "CONNECT_S", 0.05)
    assert a.moves.takes(a.home, Meet("gone"))
    await a.run(Push(key_of(0), 0, "gone"))
    sender = a.moves._links._senders["gone"]
    await until(lambda: sender.is_over)
    assert not sender._waiting


@pytest.mark.parametrize(
    ("named", "told"), [("192.0.2.7", "192.0.2.7"), ("127.0.1.1", "127.0.0.1")]
)
async def test_others_are_told_an_address_instead_of_a_star(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: str, told: str
) -> None:
    """That of the host's name, or without one of the way to others."""
    monkeypatch.setattr(socket, "gethostbyname", lambda name: named)
    monkeypatch.setattr(links, "ELSEWHERE", ("127.0.0.1", 9))
    async with working(checkpoint, tmp_path, "b", kv_transfer_address="tcp://*:0") as worker:
        address = worker.inbox.address
    assert address.startswith(f"tcp://{told}:")
    assert not address.endswith(":0")
