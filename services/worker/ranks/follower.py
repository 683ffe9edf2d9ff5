"""A worker's rank other than the first: computes the same plans on its part of the model."""

import asyncio
import logging
import time
from concurrent.futures import Future

from services.worker.engine.protocol import BuildEngine, Engine, StepOutput
from services.worker.ranks.local_ranks import LocalRanks, RankLost
from services.worker.ranks.rank_info import rank_info
from services.worker.ranks.rank_settings import LOADING_SILENCE_S, SERVICE, role_of, with_share
from services.worker.step_thread import StepThread
from services.worker.weights.progress import ProgressLines
from shared.link.address import rank_instance
from shared.link.endpoint import tcp_address
from shared.link.keys import load_keys
from shared.link.link import Link
from shared.link.peer import Peer
from shared.process.cores import bind_to_node
from shared.settings.worker import WorkerConfig
from shared.wire.codec import Array
from shared.wire.messages import (
    PROTOCOL_MAJOR,
    PROTOCOL_MINOR,
    Assemble,
    Heartbeat,
    Hello,
    Message,
    Reset,
    State,
    StepPlan,
)

log = logging.getLogger(__name__)

NOT_CONNECTED = "the first rank is not connected"


class FollowerService:
    """Dials the first rank, loads its part once all ranks are there, and ends with it. It drops its
    results, since the first rank has the same.

    On each further host the first rank there starts the others of the host.
    """

    def __init__(self, config: WorkerConfig, build: BuildEngine) -> None:
        is_started_by_rank = bool(config.leader)
        self._local_ranks = None if is_started_by_rank else LocalRanks(config)
        self._config = config if is_started_by_rank else with_share(config)
        self._build = build
        self._step_thread = StepThread()
        self._progress = NOT_CONNECTED
        self._progress_lines = ProgressLines(time.monotonic())
        self._engine: Engine | None = None
        self._link: Link | None = None
        self._num_steps = 0
        self._leader = ""
        self._is_draining = False
        self._is_assembled = asyncio.Event()
        self._is_over = asyncio.Event()

    async def run(self) -> None:
        """Raises RankLost on a host other than the first rank's, if the first rank or one of this
        host is lost."""
        if self._local_ranks is None:
            await self._follow()
            return
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(self._local_ranks.run())
            await self._local_ranks.until_started()
            await self._follow()
            running.cancel()

    async def _follow(self) -> None:
        config = self._config
        if config.numa_node is not None and (why := bind_to_node(config.numa_node)):
            log.warning("numa-node: memory cannot be bound to the node (%s)", why)
        self._link = self._dialling()
        try:
            async with asyncio.TaskGroup() as tasks:
                running = tasks.create_task(self._link.run())
                await self._is_assembled.wait()
                self._link.loading_silence_s = LOADING_SILENCE_S
                await self._load(self._link)
                await self._is_over.wait()
                running.cancel()
        finally:
            await self._link.close("the rank leaves")

    def _dialling(self) -> Link:
        config, keys = self._config, None
        name = rank_instance(config.instance.partition(".rank")[0], config.rank)
        addresses = []
        if config.node_rank and config.master_addr is not None:
            addresses = [tcp_address(config.master_addr, config.master_port)]
            keys = load_keys(config.keys, SERVICE)
        hello = Hello(PROTOCOL_MAJOR, PROTOCOL_MINOR, SERVICE, name, rank=rank_info(config))
        link = Link(hello, self, keys)
        role = role_of(config.leader)
        link.dial(SERVICE, config.mesh_dir, role, tcp=addresses, takes_one=True)
        return link

    async def _load(self, link: Link) -> None:
        config = self._config.model_copy(update={"leader": self._leader})
        self._engine = await asyncio.get_running_loop().run_in_executor(
            self._step_thread.executor, self._build, config, self._note_progress
        )
        link.send_status()

    async def drain(self) -> None:
        """Waits for the first rank, which finishes open sequences and then ends all ranks. Before
        all have loaded there is nothing to wait for."""
        if self._link is None or not self._are_loaded(self._link):
            return
        self._is_draining = True
        self._link.send_status()
        await self._is_over.wait()

    def _are_loaded(self, link: Link) -> bool:
        """True if this rank has loaded and the first rank reports that all have."""
        return self._engine is not None and any(first.is_ready for first in link.peers)

    def status(self) -> Heartbeat:
        if self._engine is None:
            return Heartbeat(State.NOT_READY, self._progress, 0, 0)
        if self._is_draining:
            return Heartbeat(State.DRAINING, "finishing open requests", 0, self._num_steps)
        return Heartbeat(State.READY, "", 0, self._num_steps)

    def refusal(self, hello: Hello) -> str | None:
        return None

    def on_up(self, peer: Peer) -> None:
        self._progress = "waits for other ranks"

    def on_down(self, peer: Peer, reason: str) -> None:
        if not self._is_assembled.is_set():
            self._progress = NOT_CONNECTED
        elif self._config.node_rank and not self._is_draining:
            raise RankLost(f"the first rank is lost: {reason}")
        else:  # stopped on purpose, or the process that started it logs it
            self._is_over.set()

    def on_message(self, peer: Peer, message: Message, arrays: list[Array]) -> None:
        if isinstance(message, StepPlan):
            assert self._engine is not None
            output: Future[StepOutput] = Future()
            self._step_thread.submit(self._engine.submit, message, arrays[0], output)
            self._num_steps += 1
        elif isinstance(message, Reset):
            assert self._engine is not None
            self._step_thread.submit(self._engine.reset)
        elif isinstance(message, Assemble):
            self._leader = peer.hello.instance
            self._is_assembled.set()
        else:
            log.warning("%s sent a %s, which is not for us", peer, type(message).__name__)

    def _note_progress(self, text: str, fraction: float) -> None:
        """Runs on the step thread."""
        self._progress = f"{text} {fraction:.0%}"
        if self._progress_lines.is_due(time.monotonic()):
            log.info("%s", self._progress)
