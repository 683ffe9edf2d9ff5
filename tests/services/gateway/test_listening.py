"""The gateway's addresses, and their backlog."""

import asyncio
import errno
import signal
import socket
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from cli.serve import check_port
from services.gateway.http.server import HttpSite
from services.gateway.service import GatewayService
from shared.errors import ConfigError
from shared.link.tcp import url_host
from shared.process.metrics import tcp_counts
from shared.settings.load import load_settings
from shared.settings.serve import ServeConfig
from tests.services.gateway.client import raw_post
from tests.services.gateway.fakes import FakeTokenizer, running_gateway
from tests.services.gateway.process import gateway_process

SOMAXCONN = Path("/proc/sys/net/core/somaxconn")
MAX_BACKLOG_OFFSET = 28  # offset of tcpi_sacked, the kernel's backlog of a listening socket
NUM_CLIENTS = 2000
NETSTAT = """TcpExt: SyncookiesSent ListenOverflows ListenDrops
TcpExt: 0 3 46439
IpExt: InNoRoutes
IpExt: 7
"""


async def test_backlogs_are_as_long_as_the_kernel_lets_them_be(gateway: GatewayService) -> None:
    site: Any = next(each for each in gateway._runner.sites if isinstance(each, HttpSite))
    [listening] = site._server.sockets
    info = listening.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 104)
    given = int.from_bytes(info[MAX_BACKLOG_OFFSET : MAX_BACKLOG_OFFSET + 4], "little")
    assert given == min(4096, int(SOMAXCONN.read_text()))


async def test_overflows_are_counted(gateway: GatewayService) -> None:
    assert tcp_counts(NETSTAT) == {"SyncookiesSent": 0, "ListenOverflows": 3, "ListenDrops": 46439}
    assert tcp_counts("") == {}
    url = f"http://127.0.0.1:{gateway.port}/metrics"
    async with aiohttp.ClientSession() as http, http.get(url) as response:
        text = await response.text()
    assert "\nshoal_listen_overflows_total " in text
    assert "\nshoal_listen_drops_total " in text
    assert "network namespace" in text


@pytest.mark.parametrize("host", ["::", ""])
async def test_every_address_is_one_of_ipv4_too(
    tmp_path: Path, tokenizer: FakeTokenizer, caplog: pytest.LogCaptureFixture, host: str
) -> None:
    caplog.set_level("INFO")
    if not socket.has_dualstack_ipv6():
        pytest.skip("the kernel has no IPv6")
    async with running_gateway(tmp_path, host=host) as gateway, aiohttp.ClientSession() as http:
        for address in ("127.0.0.1", "[::1]"):
            async with http.get(f"http://{address}:{gateway.port}/ping") as response:
                assert response.status == 200
        assert f"listening on http://{url_host(host)}:{gateway.port}" in caplog.text


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("", "127.0.0.1"),
        ("0.0.0.0", "127.0.0.1"),
        ("::", "[::1]"),
        ("fe80::1", "[fe80::1]"),
        ("10.0.0.1", "10.0.0.1"),
        ("models.example", "models.example"),
    ],
)
def test_a_host_is_shown_as_it_stands_in_a_url(host: str, expected: str) -> None:
    assert url_host(host) == expected


async def test_a_port_that_ipv4_has_is_taken(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        config = load_settings(ServeConfig, ["--host", "::", "--port", port], "shoal serve")
        with pytest.raises(ConfigError, match="Address already in use"):
            check_port(config)


@pytest.mark.slow
async def test_of_many_connections_at_once_each_has_an_answer(
    tmp_path: Path, tokenizer: FakeTokenizer
) -> None:
    """They arrive while the gateway accepts none, as on a busy machine."""
    if int(SOMAXCONN.read_text()) < NUM_CLIENTS:
        pytest.skip(f"net.core.somaxconn is below {NUM_CLIENTS}")
    flags = ("--max-open-requests", "1000")
    async with gateway_process(tmp_path, *flags, num_files=1500) as gateway, asyncio.timeout(200):
        before = await gateway.metric("shoal_listen_overflows_total")
        with ExitStack() as stack:
            clients = [stack.enter_context(socket.socket()) for _ in range(NUM_CLIENTS)]
            gateway.process.send_signal(signal.SIGSTOP)
            for client in clients:
                client.setblocking(False)
                code = client.connect_ex(("127.0.0.1", gateway.port))
                assert code in (0, errno.EINPROGRESS)
            asking = [asyncio.create_task(status_of(client)) for client in clients]
            await asyncio.sleep(1)
            gateway.process.send_signal(signal.SIGCONT)
            answering = asyncio.create_task(answer_all(tokenizer))
            statuses = Counter(await asyncio.gather(*asking))
            answering.cancel()
        assert statuses.keys() <= {200, 429, 503}
        assert await gateway.metric("shoal_listen_overflows_total") == before


async def status_of(client: socket.socket) -> int:
    reader, writer = await asyncio.open_connection(sock=client)
    writer.write(raw_post(prompt="a"))
    line = await reader.readline()
    await reader.readuntil(b"}}" if b" 200 " not in line else b'"choices":')
    writer.close()
    return int(line.split()[1])


async def answer_all(tokenizer: FakeTokenizer) -> None:
    while True:
        await tokenizer.answer("x")
