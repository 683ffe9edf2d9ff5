"""Launches that begin before the launch in front of them has ended: programmatic dependent launch,
from compute capability 9.0 on.

A kernel of such a launch ``begin``s before it reads or writes anything, in each of its programs.
There it waits until the launch in front has ended, which had waited for the one before in the same
way: so all that was launched before has ended, and what it wrote is seen. Then the launch behind
may begin. A kernel that does not ``begin`` is not launched so, and waits before it starts.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_waits = ContextVar("waits", default=False)


def waits() -> bool:
    """Whether launches of this thread wait for the launch in front, whatever the switch says."""
    return _waits.get()


@contextmanager
def one_by_one(applies: bool) -> Iterator[None]:
    """Launches within wait for the launch in front: copies of another stream stand between."""
    token = _waits.set(applies)
    try:
        yield
    finally:
        _waits.reset(token)
