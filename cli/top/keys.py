"""Single keys of a terminal, without an end of line."""

import select
import sys
import termios
import time
import tty
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def single_keys() -> Iterator[None]:
    """Within it keys arrive one by one and are not echoed; restores the terminal at the end. Does
    nothing if standard input is no terminal."""
    if not sys.stdin.isatty():
        yield
        return
    before = termios.tcgetattr(sys.stdin)
    tty.setcbreak(sys.stdin)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def wait_for_key(seconds: float) -> str:
    """Returns the key pressed within ``seconds``, or ""."""
    if not sys.stdin.isatty():
        time.sleep(seconds)
        return ""
    has_key, _, _ = select.select([sys.stdin], [], [], seconds)
    return sys.stdin.read(1) if has_key else ""
