"""The state of a service for people and supervisors: one that stands by is ready."""

from typing import Protocol, runtime_checkable

from shared.link.peer import Handler
from shared.wire.messages import State


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
