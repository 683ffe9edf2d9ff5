"""Third-party proxies in front of a gateway, with persistent connections."""

import asyncio
import os
import re
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from benchmarks.harness.docker_engine import ROOT
from benchmarks.harness.ports import free_port
from benchmarks.harness.ready import until_ready

SBIN = "/usr/sbin"
NGINX = """
daemon off;
worker_processes 1;
pid {folder}/nginx.pid;
error_log {folder}/log;
events {{ worker_connections 1024; }}
http {{
    access_log off;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    upstream gateway {{ server 127.0.0.1:{gateway}; keepalive 16; }}
    server {{
        listen 127.0.0.1:{port};
        keepalive_requests 1000000;
        location / {{
            proxy_pass http://gateway;
            proxy_http_version 1.1;
            proxy_set_header Connection "";
            proxy_set_header Host $http_host;
        }}
    }}
}}
"""
HAPROXY = """
defaults
    mode http
    timeout connect 2s
    timeout client 60s
    timeout server 60s
    {reuse}
listen gateway
    bind 127.0.0.1:{port}
    server gateway 127.0.0.1:{gateway}
"""


def nginx(folder: Path, gateway: int, port: int) -> list[str]:
    """A command for nginx with upstream ``keepalive``, as in ingress controllers."""
    file = folder / "nginx.conf"
    file.write_text(NGINX.format(folder=folder, gateway=gateway, port=port))
    return ["nginx", "-e", str(folder / "log"), "-c", str(file)]


def haproxy(folder: Path, gateway: int, port: int) -> list[str]:
    """A command for HAProxy with its defaults."""
    return _haproxy(folder, HAPROXY.format(reuse="", gateway=gateway, port=port))


def haproxy_reusing(folder: Path, gateway: int, port: int) -> list[str]:
    """A command for HAProxy that sends requests of all clients through any connection."""
    reuse = "http-reuse always"
    return _haproxy(folder, HAPROXY.format(reuse=reuse, gateway=gateway, port=port))


def edge(folder: Path, gateway: int, port: int) -> list[str]:
    """A command for the stack's own HAProxy, with this machine's addresses."""
    text = (ROOT / "compose/edge/haproxy.cfg").read_text()
    for pattern, new in (
        (r"server-template gateway 32 gateway:8000", f"server gateway 127.0.0.1:{gateway}"),
        (r"bind :8000$", f"bind 127.0.0.1:{port}"),
        (r"bind :8405$", f"bind 127.0.0.1:{free_port()}"),
    ):
        text, num_found = re.subn(pattern, new, text, flags=re.MULTILINE)
        assert num_found, pattern
    return _haproxy(folder, text)


Proxy = Callable[[Path, int, int], list[str]]
PROXIES: list[Proxy] = [nginx, haproxy_reusing, haproxy, edge]


@asynccontextmanager
async def running(proxy: Proxy, folder: Path, gateway: int) -> AsyncIterator[int]:
    """The port of ``proxy`` in front of the port ``gateway``, once it answers."""
    port = free_port()
    name, *arguments = proxy(folder, gateway, port)
    path = shutil.which(name, path=f"{os.environ['PATH']}:{SBIN}")
    if path is None:
        pytest.skip(f"{name} is not installed (Debian: {name})")
    with (folder / "output").open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            *(path, *arguments),
            stdout=output,
            stderr=output,
            env=os.environ | {"EDGE_CERTIFICATE": ""},
        )
    try:
        await until_ready(f"http://127.0.0.1:{port}", process, (folder / "output").read_text)
        yield port
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


def _haproxy(folder: Path, text: str) -> list[str]:
    file = folder / "haproxy.cfg"
    file.write_text(text)
    return ["haproxy", "-db", "-f", str(file)]
