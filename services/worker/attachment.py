"""The worker's choice of one scheduler among all connected ones."""

import logging
import math
from collections.abc import Callable, Collection, Iterable
from hashlib import blake2b

from shared.link.peer import Peer
from shared.wire.messages import CELLS_MINOR, Attach, Detach, Overview, Release

log = logging.getLogger(__name__)

SETTLED_S = 5.0  # connection time of a scheduler before workers move to it; chosen, not measured


class Attachment:
    """Attaches the worker ``instance`` to one of its ``schedulers``, ``home``, and moves it to a
    cell with too few workers. A moving worker takes no new sequences, and hands the remaining ones
    over after ``patience_s``. Times are monotonic.

    ``on_detach`` is called when the worker must forget its scheduler's sequences.
    """

    def __init__(
        self,
        instance: str,
        schedulers: Callable[[], Collection[Peer]],
        patience_s: float,
        on_detach: Callable[[], None],
        on_attach: Callable[[Peer], None] = lambda home: None,
    ) -> None:
        self.home: Peer | None = None
        self._instance = instance
        self._schedulers = schedulers
        self._patience_s = patience_s
        self._on_detach = on_detach
        self._on_attach = on_attach
        self._up_s: dict[Peer, float] = {}
        self._release_s: float | None = None  # time of the handover, if it is moving

    @property
    def is_moving(self) -> bool:
        return self._release_s is not None

    def add(self, scheduler: Peer, now_s: float) -> None:
        """A scheduler below ``CELLS_MINOR`` treats every connected worker as its own."""
        self._up_s[scheduler] = now_s
        if scheduler.hello.minor < CELLS_MINOR and self.home is None:
            self.home = scheduler

    def lose(self, scheduler: Peer) -> None:
        del self._up_s[scheduler]
        if scheduler is self.home:
            self._leave()

    def look(self, now_s: float, is_idle: bool) -> None:
        """Attaches, detaches or moves if due. ``is_idle``: nothing is left to compute."""
        if self.home is not None and self._is_over(self.home, now_s, is_idle):
            log.info("leaves %s", self.home)
            self.home.send(Detach())
            self._leave()
        chosen = choose_scheduler(self._instance, self._schedulers())
        if self.home is None and chosen is not None:
            self.home = chosen
            chosen.send(Attach())
            self._on_attach(chosen)
            log.info("attached to %s", chosen)

    def _is_over(self, home: Peer, now_s: float, is_idle: bool) -> bool:
        settled = [peer for peer, up_s in self._up_s.items() if now_s - up_s >= SETTLED_S]
        if self._release_s is None:
            if should_move(self._instance, home, settled):
                self._release_s = now_s + self._patience_s
        elif self._release_s < math.inf and not is_lacking(home, settled):
            self._release_s = None  # workers or the other cell were lost meanwhile
        elif now_s >= self._release_s:
            self._release_s = math.inf
            home.send(Release())
        return is_idle and (self.is_moving or may_leave(home, self._schedulers()))

    def _leave(self) -> None:
        self.home, self._release_s = None, None
        self._on_detach()


MIN_DIFFERENCE = 2
"""A worker moves only to a cell with at least this number of workers less: with 1, it would move
back at the next look."""


def choose_scheduler(worker: str, schedulers: Iterable[Peer]) -> Peer | None:
    """Returns the scheduler with the fewest workers among the staying ones, or among all if none
    stays; None if none has reported its number of workers. Ties are broken by a hash of both names,
    so that workers spread."""
    known = [(peer, each) for peer in schedulers if (each := peer.status.overview) is not None]
    staying = [(peer, each) for peer, each in known if not each.is_leaving]
    chosen = min(
        staying or known,
        key=lambda pair: (pair[1].num_workers, _rank(worker, pair[1].scheduler)),
        default=None,
    )
    return chosen[0] if chosen is not None else None


def may_leave(home: Peer, schedulers: Iterable[Peer]) -> bool:
    """True if ``home`` is leaving and another scheduler is not."""
    overview = home.status.overview
    return overview is not None and overview.is_leaving and any(_staying(schedulers, home))


def should_move(worker: str, home: Peer, schedulers: Iterable[Peer]) -> bool:
    """True if another cell lacks a worker and ``worker`` is the one to go: the spare one of
    ``home``, if no cell has more workers than this one. Of equally large cells the last by name
    gives."""
    own, others = home.status.overview, list(_staying(schedulers, home))
    if own is None or own.spare != worker or not is_lacking(home, schedulers):
        return False
    return own is max([own, *others], key=lambda each: (each.num_workers, each.scheduler))


def is_lacking(home: Peer, schedulers: Iterable[Peer]) -> bool:
    """True if another cell has at least ``MIN_DIFFERENCE`` workers less."""
    own = home.status.overview
    return own is not None and any(
        own.num_workers - each.num_workers >= MIN_DIFFERENCE for each in _staying(schedulers, home)
    )


def _staying(schedulers: Iterable[Peer], home: Peer) -> Iterable[Overview]:
    for peer in schedulers:
        overview = peer.status.overview
        if peer is not home and overview is not None and not overview.is_leaving:
            yield overview


def _rank(worker: str, scheduler: str) -> bytes:
    return blake2b(f"{worker} {scheduler}".encode(), digest_size=8).digest()
