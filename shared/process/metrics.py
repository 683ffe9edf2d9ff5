"""The metrics of every service; each service adds its own in its ``metrics.py``."""

from collections.abc import Callable, Iterator
from pathlib import Path

from prometheus_client import REGISTRY, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from shared.version import VERSION
from shared.wire.messages import ServiceName

PEERS = Gauge("shoal_peers", "Connected peers", ["service"])
PEERS_LOST = Counter("shoal_peers_lost", "Connections that ended without a Bye", ["service"])
PEERS_REFUSED = Counter("shoal_peers_refused", "Connections that got no further than Hello")
DIALS_FAILED = Counter("shoal_dials_failed", "Attempts to connect that led to no peer")
LOOKUPS_FAILED = Counter(
    "shoal_lookups_failed", "Lookups of a name, or of the mesh directory, that failed"
)
MESSAGES = Counter("shoal_messages", "Messages by peer and direction", ["service", "direction"])
MESSAGE_BYTES = Counter(
    "shoal_message_bytes", "Bytes in messages, by peer and direction", ["service", "direction"]
)
BAD_MESSAGES = Counter(
    "shoal_bad_messages", "Messages that do not decode, or whose parts do not fit"
)
LINK_ROUND_TRIP = Histogram(
    "shoal_link_round_trip_seconds",
    "From a heartbeat to its echo, less the time the peer held it: two hops and both event loops",
    ["service"],
    buckets=(0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5),
)
SPANS_DROPPED = Counter("shoal_spans_dropped", "Spans of traces for which there was no room")
LINES_DROPPED = Counter(
    "shoal_log_lines_dropped", "Lines of the log that could not be written, or not fast enough"
)
READY = Gauge("shoal_ready", "1 while this service is ready, else 0")
SERVICE_INFO = Gauge(
    "shoal_service_info", "Who this is; always 1", ["service", "instance", "version"]
)

NETSTAT = Path("/proc/self/net/netstat")


class ListenOverflows(Collector):
    """The kernel's counts of connections that no process accepted in time."""

    def collect(self) -> Iterator[CounterMetricFamily]:
        try:
            counts = tcp_counts(NETSTAT.read_text())
        except OSError:  # missing in some sandboxes
            return
        for name, kernels, text in (
            ("overflows", "ListenOverflows", "that found the queue of a listening socket full"),
            ("drops", "ListenDrops", "that were dropped at a listening socket, overflows included"),
        ):
            yield CounterMetricFamily(
                f"shoal_listen_{name}",
                f"TCP connections {text}, of all processes in this network namespace, since it"
                " began",
                counts.get(kernels, 0),
            )


def tcp_counts(netstat: str) -> dict[str, int]:
    """The TcpExt counts of a text like /proc/net/netstat: a line of names, a line of values."""
    lines = [line.split()[1:] for line in netstat.splitlines() if line.startswith("TcpExt:")]
    return {name: int(value) for name, value in zip(*lines, strict=True)} if lines else {}


REGISTRY.register(ListenOverflows())


def show_service(service: ServiceName, instance: str, is_ready: Callable[[], bool]) -> None:
    """``is_ready`` is evaluated at each scrape."""
    SERVICE_INFO.labels(service, instance, VERSION).set(1)
    READY.set_function(is_ready)
