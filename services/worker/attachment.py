"""The scheduler that a worker is attached to, one of all it is connected with."""

import logging
import math
from collections.abc import Callable, Collection

from services.worker.cells import choose_scheduler, is_lacking, may_leave, should_move
from shared.link.peer import Peer
from shared.wire.messages import CELLS_MINOR, Attach, Detach, Release

log = logging.getLogger(__name__)

SETTLED_S = 5.0  # for which a scheduler has been there before workers move to it; chosen


class Attachment:
    """Attaches the worker ``instance`` to one of its ``schedulers``, ``home``, and moves it where
    another cell lacks one: it takes nothing new then, and hands over after ``patience_s`` what has
    not ended. Times are monotonic.

    ``on_detach`` is called when the worker has to forget what it has of its scheduler.
    """

    def __init__(
        self,
        instance: str,
        schedulers: Callable[[], Collection[Peer]],
        patience_s: float,
        on_detach: Callable[[], None],
    ) -> None:
        self.home: Peer | None = None
        self._instance = instance
        self._schedulers = schedulers
        self._patience_s = patience_s
        self._on_detach = on_detach
        self._up_s: dict[Peer, float] = {}
        self._release_s: float | None = None  # when to hand over, if it is moving

    @property
    def is_moving(self) -> bool:
        return self._release_s is not None

    def add(self, scheduler: Peer, now_s: float) -> None:
        """One below ``CELLS_MINOR`` takes whoever connects for its own."""
        self._up_s[scheduler] = now_s
        if scheduler.hello.minor < CELLS_MINOR and self.home is None:
            self.home = scheduler

    def lose(self, scheduler: Peer) -> None:
        del self._up_s[scheduler]
        if scheduler is self.home:
            self._leave()

    def look(self, now_s: float, is_idle: bool) -> None:
        """Attaches, detaches and moves as it is due; ``is_idle``: nothing is to be computed."""
        if self.home is not None and self._is_over(self.home, now_s, is_idle):
            log.info("leaves %s", self.home)
            self.home.send(Detach())
            self._leave()
        chosen = choose_scheduler(self._instance, self._schedulers())
        if self.home is None and chosen is not None:
            self.home = chosen
            chosen.send(Attach())
            log.info("attached to %s", chosen)

    def _is_over(self, home: Peer, now_s: float, is_idle: bool) -> bool:
        settled = [peer for peer, up_s in self._up_s.items() if now_s - up_s >= SETTLED_S]
        if self._release_s is None:
            if should_move(self._instance, home, settled):
                self._release_s = now_s + self._patience_s
        elif self._release_s < math.inf and not is_lacking(home, settled):
            self._release_s = None  # workers were lost meanwhile, or the other cell was
        elif now_s >= self._release_s:
            self._release_s = math.inf
            home.send(Release())
        return is_idle and (self.is_moving or may_leave(home, self._schedulers()))

    def _leave(self) -> None:
        self.home, self._release_s = None, None
        self._on_detach()
