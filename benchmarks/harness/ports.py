"""Ports for processes that we start."""

import socket
from contextlib import ExitStack
from random import SystemRandom

# Above these are the ports that Linux gives to connections, any of which could take one before the
# process that it is for.
LOWEST, END = 20_000, 32_768


def free_port(num: int = 1) -> int:
    """The first of ``num`` TCP ports in a row on which nothing listens at the moment. It is drawn:
    two that ask at the same time hardly get the same."""
    while True:
        first = SystemRandom().randrange(LOWEST, END - num)
        with ExitStack() as probes:
            try:
                for port in range(first, first + num):
                    probes.enter_context(socket.create_server(("", port)))
            except OSError:
                continue
            return first
