"""All faults at once on a running mesh, reproducible by seed."""

import asyncio
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import zmq
import zmq.asyncio

from benchmarks.harness.fleet import Fleet, Member
from shared.errors import WORKER_DIED
from shared.link.address import ipc_address, socket_path
from shared.link.endpoint import Endpoint, tcp_address
from shared.link.link import HEARTBEAT_S
from shared.link.peer import SILENCE_S
from shared.wire.messages import Hello, ServiceName
from tests.mesh.intruders import Attack, call_all

KINDS = ("gateway", "tokenizer", "scheduler", "worker")
ROLES = {"tokenizer": "tokenizers", "worker": "workers"}  # services at the scheduler's sockets
LOSS_S = SILENCE_S - 2 * HEARTBEAT_S  # a pause from this length on may count as a loss
NOTICE_S = 1.0  # until all services know of a loss
Protect = Callable[[zmq.asyncio.Socket], None]


class Blow(NamedTuple):
    """After ``pause_s`` the ``rank``-th service of a kind is killed, stopped, or paused for
    ``lasts_s``."""

    pause_s: float
    kind: str
    rank: int
    fault: str
    lasts_s: float
    is_early: bool  # a successor starts before the stopped service leaves

    @classmethod
    def at_random(cls, dice: random.Random, mean_pause_s: float) -> "Blow":
        return cls(
            dice.uniform(0.2, 1.8) * mean_pause_s,
            dice.choice(KINDS),
            dice.randrange(12),
            dice.choices(("kill", "stop", "pause"), (4, 3, 4))[0],
            dice.uniform(0.3, 6),
            dice.random() < 0.5,
        )


class Siege(NamedTuple):
    """Peers that send ``hello`` to the services of a kind, followed by ``attacks``."""

    kind: ServiceName
    hello: Hello
    attacks: Sequence[Attack]
    protect: Protect


@dataclass
class Storm:
    """``urls`` are those of gateways that take requests, ``lost_urls`` those of killed ones.
    ``blows`` lists the faults with their times, ``counts`` their number; ``losses`` holds by kind
    the end of the time in which requests may be lost; ``ended`` are the members ended on
    purpose."""

    fleet: Fleet
    seed: int
    mean_pause_s: float
    urls: list[str] = field(default_factory=list)
    lost_urls: set[str] = field(default_factory=set)
    blows: list[str] = field(default_factory=list)
    losses: list[tuple[float, str]] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    ended: set[Member] = field(default_factory=set)
    _struck: set[Member] = field(default_factory=set)
    _num_asked: int = 0
    _began_s: float = field(default_factory=time.monotonic)

    @property
    def now_s(self) -> float:
        return time.monotonic() - self._began_s

    async def next_url(self) -> str:
        while not self.urls:
            await asyncio.sleep(0.05)
        self._num_asked += 1
        return self.urls[self._num_asked % len(self.urls)]

    def explains(self, code: str, since_s: float) -> bool:
        """True if enough services were lost since then to explain the ``code``."""
        is_of_worker = code == WORKER_DIED
        kinds, least = ({"worker"}, 2) if is_of_worker else ({"tokenizer", "scheduler"}, 3)
        return sum(lost_s >= since_s and kind in kinds for lost_s, kind in self.losses) >= least

    async def run(self, duration_s: float, sieges: Sequence[Siege]) -> None:
        """Returns when every affected service, or a successor, is ready."""
        dice = random.Random(self.seed)
        besieging = [asyncio.create_task(self._besiege(each)) for each in sieges]
        try:
            async with asyncio.TaskGroup() as tasks:
                until_s = self.now_s + duration_s
                while self.now_s < until_s:
                    blow = Blow.at_random(dice, self.mean_pause_s)
                    await asyncio.sleep(blow.pause_s)
                    for each in besieging:
                        assert not each.done(), each.result()
                    tasks.create_task(self._strike(blow))
        finally:
            for each in besieging:
                each.cancel()
            await asyncio.gather(*besieging, return_exceptions=True)

    async def _strike(self, blow: Blow) -> None:
        targets = [each for each in self.fleet.of(blow.kind) if each not in self._struck]
        if not targets:
            return
        member = targets[blow.rank % len(targets)]
        self._struck.add(member)
        self.blows.append(f"{self.now_s:.1f} s: {member.instance}: {blow}")
        self.counts[blow.fault] += 1
        match blow.fault:
            case "kill":
                await self._kill(member)
            case "stop":
                await self._stop(member, blow.is_early)
            case _:
                await self._pause(member, blow.lasts_s)

    async def _kill(self, member: Member) -> None:
        self.losses.append((self.now_s + NOTICE_S, member.kind))
        if member.port:
            self.lost_urls.add(member.url)
            self.urls.remove(member.url)
        self.ended.add(member)
        await self.fleet.kill(member)
        await self._succeed(member)

    async def _stop(self, member: Member, is_early: bool) -> None:
        """There is one scheduler, and one service on a port."""
        is_alone = member.kind == "scheduler" or "LISTEN_ADDRESS" in member.settings
        is_early = is_early and not is_alone
        if is_early:
            await self._succeed(member)
        if member.port:
            self.urls.remove(member.url)
        self.ended.add(member)
        code = await self.fleet.stop(member)
        assert code == 0, f"{member.instance} ended with {code} when it was stopped"
        if not is_early:
            await self._succeed(member)

    async def _succeed(self, member: Member) -> None:
        successor = await self.fleet.start(member.kind, **member.settings)
        self._struck.add(successor)
        await successor.until_ready()
        self._struck.remove(successor)
        if successor.port:
            self.urls.append(successor.url)

    async def _pause(self, member: Member, lasts_s: float) -> None:
        os.kill(member.process.pid, signal.SIGSTOP)
        if lasts_s > LOSS_S:
            self.losses.append((self.now_s + lasts_s + NOTICE_S, member.kind))
        try:
            await asyncio.sleep(lasts_s)
        finally:
            os.kill(member.process.pid, signal.SIGCONT)
        await member.until_ready()
        self._struck.remove(member)

    async def _besiege(self, siege: Siege) -> None:
        """Runs without end; a service killed meanwhile answers no Hello."""
        number = 0
        while True:
            targets = self.fleet.of(siege.kind)
            if targets:
                address = address_of(targets[number % len(targets)], siege.hello.service)
                attack = siege.attacks[number % len(siege.attacks)]
                number += 1
                try:
                    async with asyncio.timeout(3):
                        await call_all(address, siege.hello, [attack], siege.protect)
                    self.counts["attack"] += 1
                except TimeoutError:
                    continue
            await asyncio.sleep(0.2)


def address_of(member: Member, dialler: ServiceName) -> str:
    """The address at which it listens for ``dialler``s."""
    if listened := member.settings.get("LISTEN_ADDRESS"):
        endpoint = Endpoint.parse(listened)
        return tcp_address(endpoint.host, endpoint.port_of(member.kind, dialler))
    role = ROLES[dialler] if member.kind == "scheduler" else ""
    return ipc_address(socket_path(member.directory, member.kind, member.instance, role))
