"""The metrics every service has; each service adds its own in its ``metrics.py``."""

from prometheus_client import Counter, Gauge

PEERS = Gauge("shoal_peers", "Connected peers", ["service"])
PEERS_LOST = Counter("shoal_peers_lost", "Connections that ended without a Bye", ["service"])
PEERS_REFUSED = Counter("shoal_peers_refused", "Connections that got no further than Hello")
MESSAGES = Counter("shoal_messages", "Messages by peer and direction", ["service", "direction"])
MESSAGE_BYTES = Counter(
    "shoal_message_bytes", "Bytes in messages, by peer and direction", ["service", "direction"]
)
BAD_MESSAGES = Counter("shoal_bad_messages", "Messages dropped because they do not decode")
