"""The other ranks of a worker, as its first one sees them: links to them."""

import asyncio
import logging
from ipaddress import ip_address

from services.worker.ranks.connect_hosts import address_of_first
from services.worker.ranks.local_ranks import RankLost
from services.worker.ranks.rank_info import difference, rank_info
from services.worker.ranks.rank_settings import LOADING_SILENCE_S, SERVICE, role_of
from shared.link.address import ranks_path
from shared.link.endpoint import tcp_address
from shared.link.keys import load_keys
from shared.link.link import Link
from shared.link.peer import Peer
from shared.settings.worker import WorkerConfig
from shared.wire.codec import Array
from shared.wire.messages import (
    PROTOCOL_MAJOR,
    PROTOCOL_MINOR,
    Assemble,
    Heartbeat,
    Hello,
    Message,
    RankInfo,
    State,
)

log = logging.getLogger(__name__)


class Followers:
    """Waits for the follower ranks, sends them the first rank's steps, and notices the loss of one.
    A worker of one rank has none."""

    def __init__(self, config: WorkerConfig) -> None:
        self._config = config
        self._awaited = set(range(1, config.num_ranks))
        self._has_others = config.nnodes > 1
        self._are_assembled = asyncio.Event()
        self._are_up = asyncio.Event()
        self._is_one_leaving = asyncio.Event()
        self._info: RankInfo
        self._link: Link | None = None
        if not self._awaited:
            self._are_assembled.set()
            self._are_up.set()

    async def run(self) -> None:
        """Runs until cancelled. Raises ConfigError if this is not the host that master-addr names;
        a callback raises RankLost if a follower is lost."""
        if not self._awaited:
            return
        config, instance = self._config, self._config.instance
        self._info = rank_info(config)
        hello = Hello(PROTOCOL_MAJOR, PROTOCOL_MINOR, SERVICE, instance, rank=self._info)
        keys = load_keys(config.keys, SERVICE) if self._has_others else None
        self._link = Link(hello, self, keys)
        store = ranks_path(config.mesh_dir, instance)
        store.unlink(missing_ok=True)  # of one that was killed
        self._link.listen(config.mesh_dir, SERVICE, role_of(instance), self._tcp())
        try:
            await self._link.run()
        finally:
            await self._link.close("the worker leaves")
            store.unlink(missing_ok=True)

    def _tcp(self) -> str | None:
        """The address for followers on other hosts."""
        name = self._config.master_addr
        if not self._has_others or name is None:
            return None
        address = address_of_first(name)
        if ip_address(address.partition("%")[0]).is_loopback:
            log.warning("master-addr: %s is %s here: no other machine can reach it", name, address)
        return tcp_address(address, self._config.master_port)

    @property
    def missing(self) -> str | None:
        """Which ranks of other hosts are waited for, or None."""
        if not self._has_others or self._are_assembled.is_set():
            return None
        return f"waits for {_ranks(self._awaited)}"

    async def until_assembled(self) -> None:
        """Waits for the connections of other hosts, if any: no rank loads before."""
        if self._has_others:
            await self._are_assembled.wait()

    async def until_up(self) -> None:
        """Waits until all followers have loaded their share."""
        await self._are_up.wait()

    async def until_one_leaves(self) -> None:
        """Returns once a follower was told to stop and waits for open requests to end."""
        await self._is_one_leaving.wait()

    def send(self, message: Message, *arrays: Array) -> None:
        """Sends to each follower; messages are handled in order."""
        if self._link is not None:
            for peer in self._link.peers:
                peer.send(message, *arrays)

    def status(self) -> Heartbeat:
        if self._are_up.is_set():
            return Heartbeat(State.READY, "", 0, 0)
        return Heartbeat(State.NOT_READY, "the ranks load the model", 0, 0)

    def refusal(self, hello: Hello) -> str | None:
        if hello.rank is None or hello.rank.rank not in self._awaited:
            rank = hello.rank and hello.rank.rank
            return f"rank {rank} is not waited for: two hosts may have the same node-rank"
        return difference(hello.rank, self._info)

    def on_up(self, peer: Peer) -> None:
        assert self._link is not None
        assert peer.hello.rank is not None
        self._awaited.remove(peer.hello.rank.rank)
        peer.on_state = self._look
        if not self._awaited:
            self._link.loading_silence_s = LOADING_SILENCE_S
            self._are_assembled.set()
            self.send(Assemble())
        elif self._has_others:
            log.info("waits for %s", _ranks(self._awaited))

    def on_message(self, peer: Peer, message: Message, arrays: list[Array]) -> None:
        log.warning("%s sent a %s, which is not for us", peer, type(message).__name__)

    def on_down(self, peer: Peer, reason: str) -> None:
        if self._are_assembled.is_set():
            raise RankLost(f"{peer} is lost: {reason}")
        assert peer.hello.rank is not None
        self._awaited.add(peer.hello.rank.rank)

    def _look(self) -> None:
        assert self._link is not None
        is_whole = self._are_assembled.is_set()
        if is_whole and all(peer.is_ready for peer in self._link.peers):
            self._are_up.set()
        if any(peer.status.state == State.DRAINING for peer in self._link.peers):
            self._is_one_leaving.set()


def _ranks(numbers: set[int]) -> str:
    return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(map(str, sorted(numbers)))}"
