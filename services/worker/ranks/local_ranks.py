"""The processes of the other ranks on this host, which its first rank starts."""

import asyncio
import socket
import sys
from asyncio.subprocess import DEVNULL, Process

from services.worker.ranks.rank_settings import SERVICE, environment_of, shares_of
from shared.errors import ConfigError, LostError
from shared.settings.worker import WorkerConfig

WRONG_SETTING = 2


class RankLost(LostError):
    """A rank ended or is silent, so all end: the others would wait for it forever."""


class LocalRanks:
    """Starts them, and ends them with the rank that has started them. Raises ConfigError as
    ``shares_of`` does."""

    def __init__(self, config: WorkerConfig) -> None:
        self._config = config
        self._shares = shares_of(config)
        self._have_started = asyncio.Event()
        self._processes: list[Process] = []
        self._ends: list[socket.socket] = []

    async def run(self) -> None:
        """Runs until cancelled. Raises RankLost if a rank ends, ConfigError if it ends for a wrong
        setting."""
        first, *others = self._config.ranks_of_host
        try:
            async with asyncio.TaskGroup() as tasks:
                for rank in others:
                    self._processes.append(await self._start(rank, self._shares[rank - first]))
                    tasks.create_task(_watch(rank, self._processes[-1], self._config.ranks_setting))
                self._have_started.set()
        finally:
            for process in self._processes:
                if process.returncode is None:
                    process.kill()
                    await process.wait()

    async def until_started(self) -> None:
        """They have the cores and the memory that we had until now."""
        await self._have_started.wait()

    async def _start(self, rank: int, share: dict[str, str]) -> Process:
        """Starts it in a session of its own: a terminal's signals are for the first rank. It ends
        when our end of a pair of sockets closes, at the latest when we end."""
        ours, theirs = socket.socketpair()
        self._ends.append(ours)
        with theirs:
            return await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", f"services.{SERVICE}"),
                env=environment_of(self._config, rank, share, theirs.fileno()),
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
                stdin=DEVNULL,
            )


async def _watch(rank: int, process: Process, setting: str) -> None:
    code = await process.wait()
    if code == WRONG_SETTING:
        raise ConfigError(f"{setting}: rank {rank} cannot start, and says why")
    raise RankLost(f"rank {rank} ended with code {code}")
