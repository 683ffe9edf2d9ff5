"""How long a heartbeat and its echo are on their way, by the clock of one end alone. Pure."""

import msgspec

from shared.wire.messages import Heartbeat


class RoundTrip:
    """Measures round trips by the heartbeats of one connection. ``now_s`` is our monotonic clock; a
    peer sends its times back, with how long it held them by its own clock. ``last_s`` is the last
    one."""

    def __init__(self) -> None:
        self._received_s = 0.0  # when the peer's last heartbeat came
        self._to_echo_s = 0.0  # the ``sent_s`` of that heartbeat
        self._last_echo_s = 0.0
        self.last_s: float | None = None

    def stamped(self, heartbeat: Heartbeat, now_s: float) -> Heartbeat:
        """``heartbeat`` as this peer gets it now."""
        held_s = now_s - self._received_s if self._to_echo_s else 0.0
        return msgspec.structs.replace(
            heartbeat, sent_s=now_s, echo_s=self._to_echo_s, held_s=held_s
        )

    def note_heartbeat(self, heartbeat: Heartbeat, now_s: float) -> float | None:
        """Seconds that our heartbeat and its echo travelled; None where it brings no new echo, or
        one that cannot be true."""
        self._received_s, self._to_echo_s = now_s, heartbeat.sent_s
        elapsed_s = now_s - heartbeat.echo_s
        if not (self._last_echo_s < heartbeat.echo_s and 0 <= heartbeat.held_s <= elapsed_s):
            return None
        self._last_echo_s = heartbeat.echo_s
        self.last_s = elapsed_s - heartbeat.held_s
        return self.last_s
