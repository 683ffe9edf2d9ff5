"""The state of a service for people and supervisors, and reports of it, sent on request only."""

import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol, runtime_checkable

from shared.errors import CodecError
from shared.link.link import Link
from shared.link.peer import Handler, Peer
from shared.wire.messages import (
    REPORT_MINOR,
    Ended,
    Inquire,
    ReportedPeer,
    ServiceReport,
    State,
    Stats,
)

STATM = Path("/proc/self/statm")
PATIENCE_S = 2.0  # reports are passed on to askers for this long
_STARTED_S = time.monotonic()


@runtime_checkable
class CanStandBy(Protocol):
    """A service that may have no work while others do."""

    @property
    def stands_by(self) -> bool:
        """True if the service could work at once, but others have the work."""


def is_fit(handler: Handler) -> bool:
    """True if a service can work or stands by."""
    if handler.status().state == State.READY:
        return True
    return isinstance(handler, CanStandBy) and handler.stands_by


def state_of(handler: Handler) -> State:
    """The state for people: one that stands by is ready."""
    return State.READY if is_fit(handler) else handler.status().state


def make_report(
    link: Link,
    stats: Stats,
    stats_of: Callable[[Peer], Stats] = lambda peer: {},
    lists: Callable[[Peer], bool] = lambda peer: True,
) -> ServiceReport:
    """The report of ``link``'s service: its own ``stats``, and ``stats_of`` each peer for which
    ``lists`` is true."""
    now_s, status = time.monotonic(), link.handler.status()
    peers = [_reported(peer, "", stats_of(peer)) for peer in link.peers if lists(peer)]
    ended = [
        _reported(each.peer, "lost" if each.is_lost else "left", {})
        for each in link.ended.recent(now_s)
    ]
    return ServiceReport(
        service=link.hello.service,
        instance=link.hello.instance,
        state=state_of(link.handler),
        reason=status.reason,
        was_ready=link.was_ready,
        uptime_s=now_s - _STARTED_S,
        peers=peers + ended,
        stats={**stats, "memory_bytes": _resident_bytes(), "cpu_s": time.process_time()},
    )


class Inquiries:
    """Passes requests for reports on, and returns the reports to recent askers."""

    def __init__(self) -> None:
        self._asked_s: dict[Peer, float] = {}

    def ask(self, asker: Peer, peers: Iterable[Peer], now_s: float) -> None:
        """Passes ``asker``'s request on to the other ``peers`` that support it."""
        self._forget_old(now_s)
        self._asked_s[asker] = now_s
        ask_all(peer for peer in peers if peer is not asker)

    def pass_on(self, report: ServiceReport, now_s: float) -> None:
        self._forget_old(now_s)
        for asker in self._asked_s:
            asker.send(report)

    def _forget_old(self, now_s: float) -> None:
        self._asked_s = {
            peer: asked_s
            for peer, asked_s in self._asked_s.items()
            if peer.is_up and now_s - asked_s <= PATIENCE_S
        }


def ask_all(peers: Iterable[Peer]) -> None:
    for peer in peers:
        if peer.hello.minor >= REPORT_MINOR:
            peer.send(Inquire())


def check_own(peer: Peer, report: ServiceReport) -> None:
    """Raises CodecError for a report of another service than ``peer``."""
    if (report.service, report.instance) != (peer.hello.service, peer.hello.instance):
        raise CodecError(f"a report of {report.service} {report.instance}")


def _reported(peer: Peer, ended: Ended, stats: Stats) -> ReportedPeer:
    hello, status = peer.hello, peer.status
    return ReportedPeer(
        service=hello.service,
        instance=hello.instance,
        minor=hello.minor,
        state=status.state,
        reason=status.reason,
        load=status.load,
        ended=ended,
        round_trip_s=peer.round_trip_s,
        stats=stats,
    )


def _resident_bytes() -> int:
    return int(STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
