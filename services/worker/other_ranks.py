"""Hook for the ranks that compute a worker's model together."""

import asyncio

from services.worker.engine.protocol import BuildEngine
from shared.errors import ConfigError
from shared.process.service import Service
from shared.settings.worker import WorkerConfig
from shared.wire.codec import Array
from shared.wire.messages import Message


class OtherRanks:
    """A worker's other ranks: here it has none. ``config`` has this rank's part of the machine."""

    def __init__(self, config: WorkerConfig) -> None:
        """Raises ConfigError."""
        if config.num_ranks > 1:
            setting, size = config.ranks_setting, config.num_ranks
            raise ConfigError(f"{setting}: {size}: ranks are not installed, so 1 is the limit")
        self.config = config

    @property
    def missing(self) -> str | None:
        """The ranks that are waited for."""
        return None

    @staticmethod
    def follower(config: WorkerConfig, build: BuildEngine) -> Service | None:
        """The service of this process if it is a rank that another process leads."""
        return None

    async def run(self) -> None:
        """Runs until cancelled. Raises LostError if a rank is lost."""

    async def until_assembled(self) -> None:
        """Waits for all ranks: none loads before."""

    async def until_up(self) -> None:
        """Waits until all have loaded."""

    async def until_one_leaves(self) -> None:
        """Returns once one was told to stop and waits for open requests to end."""
        await asyncio.Event().wait()

    def send(self, message: Message, *arrays: Array) -> None:
        """Sends to each; messages are handled in order."""
