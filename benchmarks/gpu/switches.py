"""Variants of ``kernels/switches.py``, compared with the current values."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

from kernels import switches


class Change(NamedTuple):
    """Another value of a name in ``kernels/switches.py``."""

    what: str
    name: str
    value: Any


AS_IT_IS = Change("none", "SPLIT_KEYS", switches.SPLIT_KEYS)


def changes() -> Iterator[Change]:
    """One change at a time."""
    for num_keys in (64, 128, 256):
        if num_keys != switches.SPLIT_KEYS:
            yield Change(f"attention splits of {num_keys} keys per turn", "SPLIT_KEYS", num_keys)
    yield Change("no programmatic dependent launch", "DEPENDENT_LAUNCHES", False)


def prompt_changes() -> Iterator[Change]:
    """Changes of prefill only; launches of decode steps are unaffected."""
    for num_heads in (1, 2, 4):
        if num_heads != switches.PROMPT_HEADS:
            yield Change(f"at most {num_heads} heads per program", "PROMPT_HEADS", num_heads)


@contextmanager
def changed(change: Change) -> Iterator[None]:
    """Applies ``change`` to launches and captures within."""
    with patch.object(switches, change.name, change.value):
        yield
