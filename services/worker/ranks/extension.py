"""The first rank's view of the others: their processes on this host, and links to all."""

import asyncio

from services.worker.engine.protocol import BuildEngine
from services.worker.extension import OtherRanks
from services.worker.ranks.follower import FollowerService
from services.worker.ranks.followers import Followers
from services.worker.ranks.local_ranks import LocalRanks
from services.worker.ranks.rank_settings import with_share
from shared.process.service import Service
from shared.settings.worker import WorkerConfig
from shared.wire.codec import Array
from shared.wire.messages import Message


class WorkerRanks(OtherRanks):
    def __init__(self, config: WorkerConfig) -> None:
        self.config = with_share(config)
        self._local_ranks, self._followers = LocalRanks(config), Followers(config)

    @staticmethod
    def follower(config: WorkerConfig, build: BuildEngine) -> Service | None:
        return FollowerService(config, build) if config.leader or config.node_rank else None

    @property
    def missing(self) -> str | None:
        return self._followers.missing

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._local_ranks.run())
            tasks.create_task(self._followers.run())

    async def until_assembled(self) -> None:
        await self._local_ranks.until_started()
        await self._followers.until_assembled()

    async def until_up(self) -> None:
        await self._followers.until_up()

    async def until_one_leaves(self) -> None:
        await self._followers.until_one_leaves()

    def send(self, message: Message, *arrays: Array) -> None:
        self._followers.send(message, *arrays)
