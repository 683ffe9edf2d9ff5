"""Kills, planned restarts, pauses, slow and leaving clients, bad requests and hostile peers, all at
once: every request ends with its right output or a Retry-After, and nothing is left behind."""

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest
import zmq.asyncio

from benchmarks.harness.fleet import Fleet, running_fleet
from benchmarks.harness.ports import free_port
from benchmarks.processes import num_descriptors, own_bytes
from cli.keys import main as make_keys
from cli.run_directory import sockets_of
from shared.link.keys import load_keys
from shared.wire.messages import (
    Cancel,
    Convert,
    Credit,
    Generate,
    Hello,
    ServiceName,
    StepResult,
    Submit,
)
from tests.mesh.intruders import MAX_MODEL_LEN, MODEL, TINY, attacks_on, hello
from tests.mesh.scheduler_arena import SchedulerArena
from tests.mesh.storm import Protect, Siege, Storm
from tests.mesh.storm_clients import Clients, connected
from tests.mesh.tokenizer_arena import TokenizerArena

# An output may need longer than usual, a successor may start late, and requests in quarantine are
# retried.
CALM = {
    "DTYPE": "float32",
    "MAX_MODEL_LEN": str(MAX_MODEL_LEN),
    "MAX_LOGPROBS": "-1",
    "DRAIN_TIMEOUT_S": "50",
    "REPLAY_S": "90",
    "QUARANTINE_S": "3",
}
EMPTY = {
    "gateway": ("shoal_open_requests", "shoal_buffered_bytes"),
    "tokenizer": ("shoal_open_requests",),
    "scheduler": ('shoal_kv_blocks{state="used"}', "shoal_kv_block_leak", "shoal_sequences"),
    "worker": ("shoal_worker_sequences",),
}
NUM_CLIENTS = 16
NUM_ATTACKS = 200
ERROR = "Traceback"
# Memory allowed after the storm beyond that before it, with the mesh idle and every output
# generated twice: for a process relative to the largest of its kind, and for all of them together.
MAX_MORE_DESCRIPTORS = 3
MAX_MORE_BYTES = 12 << 20
MAX_GROWTH = 1.02


async def start_over_ipc(fleet: Fleet, directory: Path) -> None:
    await fleet.start_all(scheduler=1, worker=2, tokenizer=2, gateway=2)


async def start_over_tcp(fleet: Fleet, directory: Path) -> None:
    """Each kind in its own directory, with keys."""
    keys = directory / "keys"
    assert make_keys([str(keys)]) == 0
    port = free_port(4)  # a scheduler has two
    *tokenizers, below = (f"tcp://127.0.0.1:{port + n}" for n in range(3))
    own = [("scheduler", {"LISTEN_ADDRESS": below})]
    own += [
        ("tokenizer", {"LISTEN_ADDRESS": each, "SCHEDULER_ADDRESS": below}) for each in tokenizers
    ]
    own += 2 * [("worker", {"SCHEDULER_ADDRESS": below})]
    own += 2 * [("gateway", {"TOKENIZER_ADDRESS": ",".join(tokenizers)})]
    for kind, settings in own:
        folder = directory / kind
        folder.mkdir(mode=0o700, exist_ok=True)
        await fleet.start(kind, **settings, MESH_DIR=str(folder), KEYS=str(keys))
    await fleet.until_ready()


STARTS = {"ipc": start_over_ipc, "tcp": start_over_tcp}


async def sieges_of(directory: Path, dice: random.Random, transport: str) -> list[Siege]:
    """Peers of every role that may call, with its key if there are keys."""
    place = directory / "beside"
    place.mkdir()
    tokenizer, scheduler = TokenizerArena(place), SchedulerArena(place)
    await scheduler.close()
    parts: list[tuple[ServiceName, Hello, Any, tuple[type, ...]]] = [
        ("tokenizer", hello("gateway"), tokenizer, (Submit, Convert, Cancel, Credit)),
        ("scheduler", hello("tokenizer", MODEL), scheduler, (Generate, Cancel, Credit)),
        ("scheduler", hello("worker", MODEL, TINY), scheduler, (StepResult,)),
    ]
    return [
        Siege(
            kind,
            who,
            attacks_on(arena, NUM_ATTACKS, dice, kinds),
            protector(directory / "keys", who.service, kind) if transport == "tcp" else no_keys,
        )
        for kind, who, arena, kinds in parts
    ]


def no_keys(socket: zmq.asyncio.Socket) -> None:
    pass


def protector(folder: Path, service: ServiceName, server: ServiceName) -> Protect:
    keys = load_keys(folder, service)
    assert keys

    def protect(socket: zmq.asyncio.Socket) -> None:
        socket.curve_secretkey, socket.curve_publickey = keys.secret, keys.public
        socket.curve_serverkey = keys.public_of(server)

    return protect


def held(fleet: Fleet) -> dict[str, tuple[str, int, int]]:
    """Kind, descriptors and bytes of each member."""
    return {
        each.instance: (each.kind, num_descriptors(each.process.pid), own_bytes(each.process.pid))
        for each in fleet.members
    }


async def check_held(fleet: Fleet, before: dict[str, tuple[str, int, int]]) -> None:
    """No service holds more than the largest of its kind did, nor all of them more than before;
    connections need time to end."""
    most = {
        kind: (
            max(num for each, num, _ in before.values() if each == kind),
            max(num_bytes for each, _, num_bytes in before.values() if each == kind),
        )
        for kind, _, _ in before.values()
    }
    for _ in range(100):
        after = held(fleet)
        more = {
            name: (num - most[kind][0], num_bytes - most[kind][1])
            for name, (kind, num, num_bytes) in after.items()
        }
        growth = _total_bytes(after) / _total_bytes(before)
        if all(_is_little(*each) for each in more.values()) and growth <= MAX_GROWTH:
            break
        await asyncio.sleep(0.1)
    print(f"held before: {most}, and more after the storm: {more}, in all {growth:.3f} times")
    assert all(_is_little(*each) for each in more.values()), more
    assert growth <= MAX_GROWTH


def _total_bytes(held: dict[str, tuple[str, int, int]]) -> int:
    return sum(num_bytes for _, _, num_bytes in held.values())


def _is_little(num_descriptors: int, num_bytes: int) -> bool:
    return num_descriptors <= MAX_MORE_DESCRIPTORS and num_bytes <= MAX_MORE_BYTES


async def check_nothing_is_left(fleet: Fleet, directory: Path) -> None:
    await fleet.until_idle()
    for member in fleet.members:
        metrics = await member.metrics()
        left = {name: metrics[name] for name in EMPTY[member.kind] if metrics[name]}
        assert not left, f"{member.instance}: {left}"
    async with connected() as session:
        for gateway in fleet.of("gateway"):
            assert await (await session.get(f"{gateway.url}/load")).json() == {"server_load": 0}
    bound = {
        path
        for each in fleet.members
        for path in sockets_of(each.directory, each.kind, each.instance)
    }
    assert set(directory.rglob("*.sock")) == {path for path in bound if path.suffix == ".sock"}


async def check_no_process_is_left(fleet: Fleet) -> None:
    """A child dies with its service, but with a delay on a busy machine."""
    sessions = {member.process.pid for member in fleet.started}
    for _ in range(100):
        if not (left := _processes_of(sessions)):
            return
        await asyncio.sleep(0.1)
    raise AssertionError(left)


def _processes_of(sessions: set[int]) -> list[str]:
    """Their stat; each service leads its own session."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            stat = path.read_text()
        except OSError:
            continue
        if int(stat.rpartition(")")[2].split()[3]) in sessions:
            found.append(stat)
    return found


async def weather(directory: Path, seed: int, transport: str, duration_s: float) -> None:
    dice = random.Random(seed)
    async with running_fleet(directory, CALM) as fleet:
        await STARTS[transport](fleet, directory)
        storm = Storm(
            fleet, seed, mean_pause_s=1.0, urls=[each.url for each in fleet.of("gateway")]
        )
        clients = Clients(storm, NUM_CLIENTS)
        await clients.learn()
        await fleet.until_idle()
        before = held(fleet)
        sieges = await sieges_of(directory, dice, transport)
        asking = asyncio.create_task(clients.run())
        try:
            await storm.run(duration_s, sieges)
        finally:
            clients.is_over = True
            await asking
            print(f"seed {seed} over {transport}:", *storm.blows, sep="\n")
            print(storm.counts, clients.ends)
        assert not clients.wrong, clients.wrong[:5]
        assert all(storm.counts[fault] for fault in ("kill", "stop", "pause", "attack"))
        assert all(clients.ends[end] for end in ("reads", "reads slowly", "errs", "has left"))
        by_themselves = set(fleet.started) - set(fleet.members) - storm.ended
        assert not by_themselves, by_themselves
        await fleet.until_ready()
        await check_nothing_is_left(fleet, directory)
        await check_held(fleet, before)
    await check_no_process_is_left(fleet)
    logs = {path.name: path.read_text() for path in directory.glob("*.log")}
    assert not {name: text[text.index(ERROR) :] for name, text in logs.items() if ERROR in text}


@pytest.mark.slow
async def test_a_storm_loses_and_changes_nothing_and_leaves_nothing(tmp_path: Path):
    await weather(tmp_path, seed=13, transport="ipc", duration_s=20)


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize(("seed", "transport"), [(20, "ipc"), (25, "tcp")])
async def test_ten_minutes_of_storm(tmp_path: Path, seed: int, transport: str):
    await weather(tmp_path, seed, transport, duration_s=600)
