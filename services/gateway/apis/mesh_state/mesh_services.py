"""The services of the mesh as clients see them, from the reports of answering services. Pure."""

from collections import defaultdict
from collections.abc import Set
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from shared.wire.messages import ReportedPeer, ServiceName, ServiceReport, State, Stats

Name = tuple[ServiceName, str]
MeshServiceState = Literal["starting", "ready", "draining", "suspect", "lost"]

ORDER: tuple[ServiceName, ...] = ("gateway", "tokenizer", "scheduler", "worker")
LOAD_NAMES: dict[ServiceName, str] = {
    "gateway": "open_requests",
    "tokenizer": "open_prompts",
    "scheduler": "running",
    "worker": "slots_used",
}
NO_ANSWER = "it does not answer"
CONNECTION_ENDED = "its connection has ended"
NO_CONNECTION = "no other service is connected to it"


class MeshLink(Struct):
    """A connection down the chain; ``round_trip_ms`` None: not measured yet."""

    role: ServiceName
    instance: str
    round_trip_ms: float | None


class MeshService(Struct):
    """``uptime_s`` None: it did not answer. ``stats`` are numbers and names, by role."""

    role: ServiceName
    instance: str
    state: MeshServiceState
    reason: str
    uptime_s: float | None
    links: list[MeshLink]
    stats: Stats

    @property
    def is_known(self) -> bool:
        """Whether it is connected to another service, or answered."""
        return self.state != "lost" and self.reason != NO_CONNECTION


def name_of(named: ServiceReport | ReportedPeer) -> Name:
    return named.service, named.instance


def list_services(
    reports: dict[Name, ServiceReport], silent: Set[Name], earlier: dict[Name, MeshService]
) -> list[MeshService]:
    """Returns the services of ``reports`` and their peers, in the order of the chain.

    ``silent`` services were asked and did not answer. ``earlier`` services without a current report
    stay listed, unless they left.
    """
    connected: dict[Name, list[tuple[Name, ReportedPeer]]] = defaultdict(list)
    ended: dict[Name, ReportedPeer] = {}
    for reporter, report in reports.items():
        for peer in report.peers:
            if peer.ended:
                ended[name_of(peer)] = peer
            else:
                connected[name_of(peer)].append((reporter, peer))
    links = _links(connected)
    listed = {name: _from_report(report) for name, report in reports.items()}
    for name, views in connected.items():
        if name not in listed:
            listed[name] = _from_peer(views[0][1], name in silent)
        for _, peer in views:
            listed[name].stats = {**listed[name].stats, **peer.stats}
    for name, service in listed.items():
        service.links = links[name]
    for name, peer in ended.items():
        if name not in listed and peer.ended == "lost":
            listed[name] = MeshService(*name, "lost", CONNECTION_ENDED, None, [], {})
    for name, service in earlier.items():
        if name not in listed and name not in ended:
            listed[name] = replace(
                service, state="suspect", reason=NO_CONNECTION, uptime_s=None, links=[]
            )
    return sorted(listed.values(), key=lambda each: (ORDER.index(each.role), each.instance))


def _links(connected: dict[Name, list[tuple[Name, ReportedPeer]]]) -> dict[Name, list[MeshLink]]:
    """The links down of each service, whichever of their ends reported them."""
    round_trips: dict[Name, dict[Name, float | None]] = defaultdict(dict)
    for name, views in connected.items():
        for reporter, peer in views:
            upper, lower = sorted((reporter, name), key=lambda each: ORDER.index(each[0]))
            if round_trips[upper].get(lower) is None or reporter == upper:
                round_trips[upper][lower] = peer.round_trip_s
    return defaultdict(
        list,
        {
            upper: [
                MeshLink(*lower, None if time_s is None else 1000 * time_s)
                for lower, time_s in sorted(lowers.items())
            ]
            for upper, lowers in round_trips.items()
        },
    )


def _from_report(report: ServiceReport) -> MeshService:
    state: MeshServiceState = _state(report.state)
    if state == "starting" and report.was_ready:
        state = "suspect"
    return MeshService(
        role=report.service,
        instance=report.instance,
        state=state,
        reason=report.reason,
        uptime_s=report.uptime_s,
        links=[],
        stats=report.stats,
    )


def _from_peer(peer: ReportedPeer, is_silent: bool) -> MeshService:
    """One that did not answer, or that an older protocol cannot ask."""
    stats: Stats = {LOAD_NAMES[peer.service]: peer.load}
    state = "suspect" if is_silent else _state(peer.state)
    reason = NO_ANSWER if is_silent else peer.reason
    return MeshService(
        role=peer.service,
        instance=peer.instance,
        state=state,
        reason=reason,
        uptime_s=None,
        links=[],
        stats=stats,
    )


def _state(state: State) -> MeshServiceState:
    match state:
        case State.READY:
            return "ready"
        case State.DRAINING:
            return "draining"
        case _:
            return "starting"
