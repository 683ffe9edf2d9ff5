"""Programmatic dependent launch: kernels that start before the previous launch has ended, from
compute capability 9.0 on.

Such a kernel calls ``begin`` in every program before it reads or writes memory, and waits there
until the previous launch has ended, which itself waited for its predecessor. All earlier launches
have then ended, and their writes are visible; the next launch may start. A kernel without ``begin``
is launched normally.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_waits = ContextVar("waits", default=False)


def waits() -> bool:
    """True if launches of this thread must wait for the previous launch, whatever the switch
    says."""
    return _waits.get()


@contextmanager
def one_by_one(applies: bool) -> Iterator[None]:
    """Within this context launches wait for the previous one, because copies of another stream lie
    between them."""
    token = _waits.set(applies)
    try:
        yield
    finally:
        _waits.reset(token)
