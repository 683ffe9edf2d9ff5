"""TCP sockets that services listen on."""

import socket

BACKLOG = 4096
"""Connections that may wait to be accepted; net.core.somaxconn is the kernel's own limit."""

EVERY_ADDRESS = ("::", "")


def listen_on_both(host: str, port: int, *, reuse_port: bool = False) -> socket.socket | None:
    """A socket for IPv6 and IPv4, if ``host`` is every address of both; else, or without IPv6,
    None. Raises OSError."""
    if host not in EVERY_ADDRESS or not socket.has_dualstack_ipv6():
        return None
    return socket.create_server(
        ("::", port),
        family=socket.AF_INET6,
        backlog=BACKLOG,
        reuse_port=reuse_port,
        dualstack_ipv6=True,
    )


def url_host(host: str) -> str:
    """``host`` in a URL for a client on this machine."""
    if host in ("", "0.0.0.0"):
        return "127.0.0.1"
    if host == "::":
        return "[::1]"
    return f"[{host}]" if ":" in host else host
