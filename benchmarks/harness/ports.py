"""Ports for processes started by benchmarks and tests."""

import socket
from contextlib import ExitStack
from random import SystemRandom

# Linux assigns ports above these to connections, which could take one before the intended process.
LOWEST, END = 20_000, 32_768


def free_port(num: int = 1) -> int:
    """The first of ``num`` consecutive TCP ports without a listener. It is chosen at random, so
    that simultaneous callers hardly get the same."""
    while True:
        first = SystemRandom().randrange(LOWEST, END - num)
        with ExitStack() as probes:
            try:
                for port in range(first, first + num):
                    probes.enter_context(socket.create_server(("", port)))
            except OSError:
                continue
            return first
