"""How long a heartbeat and its echo are on their way, by the clock of one end alone. Pure."""

import msgspec

from shared.messages import Heartbeat


class RoundTrip:
    """The heartbeats of one connection. ``now_s`` is our monotonic clock, whose times a peer only
    sends back; of its own it tells how long it held them."""

    def __init__(self) -> None:
        self._heard_s = 0.0  # when its last heartbeat came
        self._to_echo_s = 0.0  # what that one said of its own clock
        self._last_echo_s = 0.0

    def stamped(self, heartbeat: Heartbeat, now_s: float) -> Heartbeat:
        """``heartbeat`` as this peer gets it now."""
        held_s = now_s - self._heard_s if self._to_echo_s else 0.0
        return msgspec.structs.replace(
            heartbeat, sent_s=now_s, echo_s=self._to_echo_s, held_s=held_s
        )

    def note_heartbeat(self, heartbeat: Heartbeat, now_s: float) -> float | None:
        """Seconds that our heartbeat and its echo travelled; None where it brings no new echo, or
        one that cannot be true."""
        self._heard_s, self._to_echo_s = now_s, heartbeat.sent_s
        elapsed_s = now_s - heartbeat.echo_s
        if not (self._last_echo_s < heartbeat.echo_s and 0 <= heartbeat.held_s <= elapsed_s):
            return None
        self._last_echo_s = heartbeat.echo_s
        return elapsed_s - heartbeat.held_s
