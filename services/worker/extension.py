"""The seams between the worker's service and its optional parts."""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from services.worker.engine.protocol import BuildEngine, Engine
from services.worker.step_thread import StepThread
from shared.errors import ConfigError
from shared.link.extension import Extension
from shared.link.peer import Peer
from shared.process.service import Service
from shared.settings.worker import WorkerConfig
from shared.wire.codec import Array
from shared.wire.messages import Message, SpanReport, StepPlan, StepResult


@dataclass(frozen=True, slots=True)
class WorkerCore:
    """Parts of a worker that its optional parts use; ``peers`` are the schedulers, ``home`` is the
    one that it is attached to."""

    config: WorkerConfig
    engine: Engine
    step_thread: StepThread
    peers: Callable[[], Iterable[Peer]]
    home: Callable[[], Peer | None]


class WorkerExtension(Extension):
    """The messages of an optional part, and its view of the plans of one scheduler."""

    async def run(self) -> None:
        """Begins before the worker dials schedulers, and is cancelled at its end."""

    def check(self, plan: StepPlan, pixels: Sequence[Array]) -> None:
        """Called before each plan, in order; ``pixels`` are its further buffers. Raises CodecError
        for one that cannot be run."""

    def on_attach(self, home: Peer) -> None:
        """After each Attach."""

    def clear(self) -> None:
        """The scheduler is lost, and all slots are free."""

    def close(self) -> None:
        """The worker ends."""


class Observer:
    """Follows sequences through their slots; does nothing. Times are unix times."""

    def __init__(self, instance: str) -> None:
        """``instance`` is the name of this worker."""

    def begin(self, plan: StepPlan) -> None:
        """Called before each step. Raises CodecError for bad options."""

    def end(self, result: StepResult, ended_s: float) -> list[SpanReport]:
        """Called after each step, in the order of the plans. Returns reports to send with the
        result."""
        return []

    def clear(self) -> None:
        """The scheduler is lost, and all slots are free."""


class OtherRanks:
    """The ranks that compute a worker's model with it: here it has none. ``config`` has this rank's
    part of the machine."""

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
