"""Which scheduler a worker attaches to: it is connected with all of them. Pure."""

from collections.abc import Iterable
from hashlib import blake2b

from shared.link.peer import Peer
from shared.wire.messages import Overview

MIN_DIFFERENCE = 2
"""Workers that a cell has less than another before one of these moves: with 1, it would be back at
the next look."""


def choose_scheduler(worker: str, schedulers: Iterable[Peer]) -> Peer | None:
    """Returns the one with the fewest workers of those that stay, or of all if none does; None if
    none has said how many it has. Where several have as few, not all workers choose the same."""
    known = [(peer, each) for peer in schedulers if (each := peer.status.overview) is not None]
    staying = [(peer, each) for peer, each in known if not each.is_leaving]
    chosen = min(
        staying or known,
        key=lambda pair: (pair[1].num_workers, _rank(worker, pair[1].scheduler)),
        default=None,
    )
    return chosen[0] if chosen is not None else None


def may_leave(home: Peer, schedulers: Iterable[Peer]) -> bool:
    """Whether ``home`` is leaving, and another scheduler is not."""
    overview = home.status.overview
    return overview is not None and overview.is_leaving and any(_staying(schedulers, home))


def should_move(worker: str, home: Peer, schedulers: Iterable[Peer]) -> bool:
    """Whether another cell lacks a worker and ``worker`` is the one to go: that which ``home``
    names, if no cell has more workers than this one; of equal ones, one gives."""
    own, others = home.status.overview, list(_staying(schedulers, home))
    if own is None or own.spare != worker or not is_lacking(home, schedulers):
        return False
    return own is max([own, *others], key=lambda each: (each.num_workers, each.scheduler))


def is_lacking(home: Peer, schedulers: Iterable[Peer]) -> bool:
    """Whether another cell has so many workers less that it would not have more after a move."""
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
