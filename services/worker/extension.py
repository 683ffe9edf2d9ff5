"""The seam between the worker's service and its optional parts."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from services.worker.engine.protocol import Engine
from services.worker.step_thread import StepThread
from shared.link.extension import Extension
from shared.link.peer import Peer
from shared.settings.worker import WorkerConfig
from shared.wire.codec import Array
from shared.wire.messages import StepPlan


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
