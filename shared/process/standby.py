"""How a service fares to people and supervisors: one that stands by is ready."""

from typing import Protocol, runtime_checkable

from shared.link.peer import Handler
from shared.wire.messages import State


@runtime_checkable
class CanStandBy(Protocol):
    """A service that others may leave nothing to do."""

    @property
    def stands_by(self) -> bool:
        """Whether it could work at once, and others have the work."""


def is_fit(handler: Handler) -> bool:
    """Whether a service can do its work, or stands by."""
    if handler.status().state == State.READY:
        return True
    return isinstance(handler, CanStandBy) and handler.stands_by


def state_of(handler: Handler) -> State:
    """The state to report to people: one that stands by is ready."""
    return State.READY if is_fit(handler) else handler.status().state
