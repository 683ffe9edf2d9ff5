"""The seams between the scheduler service and its optional parts. Times are monotonic."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from services.scheduler.resource import Resource
from services.scheduler.results import Emission
from services.scheduler.scheduler import Scheduler
from services.scheduler.sequence import Arrival, Ended, Sequence
from services.scheduler.tokens_message import Forwarding
from shared.errors import RequestError
from shared.link.extension import Extension
from shared.link.peer import Peer
from shared.process.rate import Rate
from shared.settings.scheduler import SchedulerConfig
from shared.wire.messages import SpanReport, StepPlan


class OtherCells:
    """The schedulers of other cells, which may take prompts over: none, every prompt stays here."""

    def __init__(
        self,
        core: Scheduler,
        routes: Mapping[int, Forwarding],
        instance: str,
        on_change: Callable[[], None],
    ) -> None:
        """``routes`` lead to tokenizers. ``instance`` is the name of this scheduler.
        ``on_change`` must be called after a handover."""

    def may_have(self, sequence: Sequence, cell: str = "") -> bool:
        """True if the scheduler ``cell``, or any other, may have ``sequence``."""
        return False

    def hand_over(self, sequences: Iterable[Sequence]) -> None:
        """Hands over the prompts of ``sequences`` that another cell may have, with all their
        choices."""

    def move_waiting(self, now_s: float) -> None:
        """Hands over prompts that could start elsewhere now; called every ``LOOK_S``."""

    async def hand_over_all(self, within_s: float) -> None:
        """Hands over all sequences. Returns once no sequence is left that another cell may
        have."""


@dataclass(frozen=True)
class Cell:
    """The ``core`` of a scheduler with the settings ``config``, and its attached ``workers`` by id.
    ``on_fits`` must be called when other sequences fit the workers than before. ``ends`` is the
    rate at which sequences end."""

    config: SchedulerConfig
    core: Scheduler
    workers: Mapping[str, Peer]
    others: OtherCells
    on_fits: Callable[[], None]
    ends: Rate = field(default_factory=Rate)

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

    def check_valid(self, arrival: Arrival) -> None:
        """As ``check``, for a prompt with valid fields."""

    def fail(self, sequence: Sequence, error: RequestError, now_s: float) -> None:
        """Called for each accepted sequence that the core cannot run any more."""

    def why_unservable(self, sequence: Sequence) -> RequestError | None:
        """The reason that no worker can run ``sequence``, if this part is the reason."""

    def reset_prefix_cache(self) -> None:
        """New sequences compute their whole prompt."""

    async def leave(self, within_s: float) -> None:
        """The scheduler leaves, and hands its sequences over once this returns."""

    def look(self, now_s: float) -> None:
        """Called every ``LOOK_S``."""

    def note(self, emissions: Iterable[Emission], now_s: float) -> None:
        """Called with the output of each result."""

    def end(self, ended: Ended, now_s: float) -> None:
        """Called for each sequence that has ended."""


class Observer:
    """Follows sequences from arrival to end; does nothing."""

    def __init__(
        self,
        core: Scheduler,
        instance: str,
        send: Callable[[int, SpanReport], None],
        now_s: float,
    ) -> None:
        """``send`` sends a report to the tokenizer of a route. ``instance`` is the name of this
        scheduler."""

    def begin(self, arrival: Arrival) -> None:
        """Called after the core has added the sequences of ``arrival``."""

    def admit(self, worker: str, plan: StepPlan, now_s: float) -> None:
        """Called when ``plan`` is sent to ``worker``."""

    def account(self, now_s: float) -> None:
        """Called after each change of the core that may end sequences or make them wait."""

    def end(self, ended: Ended, now_s: float) -> None:
        """Called for each sequence that has ended."""

    def forward(self, report: SpanReport) -> None:
        """Called with each report of a worker."""
