"""What kernels may do in another way, to be measured beside the way they do it."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

from kernels import switches


class Change(NamedTuple):
    """Of a name in ``kernels/switches.py``."""

    what: str
    name: str
    value: Any


AS_IT_IS = Change("none", "SPLIT_KEYS", switches.SPLIT_KEYS)


def changes() -> Iterator[Change]:
    """Each by itself."""
    for num_keys in (64, 128, 256):
        if num_keys != switches.SPLIT_KEYS:
            yield Change(
                f"splits of attention have {num_keys} keys in turn", "SPLIT_KEYS", num_keys
            )
    yield Change("a kernel begins when the one in front has ended", "DEPENDENT_LAUNCHES", False)


def prompt_changes() -> Iterator[Change]:
    """Of prompts alone: what steps that decode launch is the same."""
    for num_heads in (1, 2, 4):
        if num_heads != switches.PROMPT_HEADS:
            yield Change(f"at most {num_heads} heads a program", "PROMPT_HEADS", num_heads)


@contextmanager
def changed(change: Change) -> Iterator[None]:
    """What is launched, or captured, within does as ``change`` says."""
    with patch.object(switches, change.name, change.value):
        yield
