"""The seam between the scheduler service and its optional parts."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from services.scheduler.other_cells import OtherCells
from services.scheduler.resource import Resource
from services.scheduler.scheduler import Scheduler
from services.scheduler.sequence import Arrival, Sequence
from shared.errors import RequestError
from shared.link.extension import Extension
from shared.link.peer import Peer
from shared.settings.scheduler import SchedulerConfig


@dataclass(frozen=True)
class Cell:
    """The ``core`` of a scheduler with the settings ``config``, and its attached ``workers`` by id.
    ``on_fits`` must be called when other sequences fit the workers than before."""

    config: SchedulerConfig
    core: Scheduler
    workers: Mapping[str, Peer]
    others: OtherCells
    on_fits: Callable[[], None]

    def id_of(self, worker: Peer) -> str | None:
        """None for a worker that is not attached."""
        return next((key for key, each in self.workers.items() if each is worker), None)


class CellExtension(Extension):
    """An optional part of a scheduler."""

    def resource_of(self, worker: Peer) -> Resource | None:
        """What the sequences of a worker that attaches share."""

    def on_attach(self, worker: Peer) -> None:
        """The worker is one of the cell's."""

    def on_detach(self, worker: Peer) -> None:
        """The worker is no longer one of the cell's; it may be connected."""

    def check(self, arrival: Arrival) -> None:
        """Raises the RequestError that refuses a prompt. It may share the pixels of others."""

    def why_unservable(self, sequence: Sequence) -> RequestError | None:
        """The reason that no worker can run ``sequence``, if this part is the reason."""

    def reset_prefix_cache(self) -> None:
        """New sequences compute their whole prompt."""

    async def leave(self, within_s: float) -> None:
        """The scheduler leaves, and hands its sequences over once this returns."""

    def look(self, now_s: float) -> None:
        """Called every ``LOOK_S``, at a monotonic time."""
