"""HTTPS at the gateway's own port."""

import asyncio
import ssl
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from services.gateway.service import GatewayService
from shared.errors import ConfigError
from shared.settings.gateway import GatewayConfig
from shared.settings.load import load_settings
from tests.certificate import make_certificate
from tests.services.gateway.fakes import running_gateway
from tests.services.gateway.test_connections import num_shed


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    make_certificate(tmp_path / "both.pem")
    return tmp_path / "both.pem"


async def ping(port: int, scheme: str, trusted: Path) -> int:
    context = ssl.create_default_context(cafile=trusted)
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"{scheme}://127.0.0.1:{port}/ping", ssl=context) as response,
    ):
        return response.status


async def test_with_a_certificate_the_port_speaks_https_and_nothing_else(
    tmp_path: Path, certificate: Path
) -> None:
    async with running_gateway(tmp_path, ssl_certfile=certificate) as gateway:
        assert await ping(gateway.port, "https", certificate) == 200
        with pytest.raises(aiohttp.ClientError):
            await ping(gateway.port, "http", certificate)


async def test_the_key_may_be_a_file_of_its_own(tmp_path: Path, certificate: Path) -> None:
    key, _, rest = certificate.read_text().partition("-----BEGIN CERTIFICATE-----")
    (tmp_path / "key.pem").write_text(key)
    (tmp_path / "certificate.pem").write_text("-----BEGIN CERTIFICATE-----" + rest)
    settings = {"ssl_certfile": tmp_path / "certificate.pem", "ssl_keyfile": tmp_path / "key.pem"}
    async with running_gateway(tmp_path, **settings) as gateway:
        assert await ping(gateway.port, "https", certificate) == 200


@pytest.mark.parametrize("content", [None, "no certificate"])
def test_a_certificate_that_cannot_be_read_is_named(tmp_path: Path, content: str | None) -> None:
    file = tmp_path / "c.pem"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ConfigError, match=r"ssl-certfile, ssl-keyfile: .*c\.pem: .+"):
        GatewayService(GatewayConfig(mesh_dir=tmp_path, ssl_certfile=file))


def test_a_key_alone_is_refused() -> None:
    with pytest.raises(ConfigError, match="there is no ssl-certfile"):
        load_settings(GatewayConfig, ["--ssl-keyfile", "key.pem"], "shoal gateway")


async def test_a_handshake_that_does_not_begin_ends_its_connection(
    tmp_path: Path, certificate: Path
) -> None:
    settings: Any = {"ssl_certfile": certificate, "header_timeout_s": 0.05}
    async with running_gateway(tmp_path, **settings) as gateway:
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
        async with asyncio.timeout(20):
            assert await reader.read() == b""
        writer.close()


async def test_a_request_that_comes_with_the_end_of_the_handshake_is_answered(
    tmp_path: Path, certificate: Path
) -> None:
    context = ssl.create_default_context(cafile=certificate)
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = context.wrap_bio(incoming, outgoing, server_hostname="127.0.0.1")
    async with running_gateway(tmp_path, ssl_certfile=certificate) as gateway:
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
        while not is_done(client):
            writer.write(outgoing.read())
            incoming.write(await reader.read(1 << 16))
        client.write(b"GET /ping HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        writer.write(outgoing.read())
        answer = b""
        while b"}" not in answer:
            incoming.write(await reader.read(1 << 16))
            answer += read_all(client)
        assert answer.startswith(b"HTTP/1.1 200")
        writer.close()


def is_done(handshake: ssl.SSLObject) -> bool:
    try:
        handshake.do_handshake()
    except ssl.SSLWantReadError:
        return False
    return True


def read_all(client: ssl.SSLObject) -> bytes:
    data = b""
    with suppress(ssl.SSLWantReadError):
        while part := client.read(1 << 16):
            data += part
    return data


async def test_a_shed_client_that_does_not_answer_the_end_of_tls_keeps_no_file(
    tmp_path: Path, certificate: Path
) -> None:
    before = num_shed("late")
    context = ssl.create_default_context(cafile=certificate)
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = context.wrap_bio(incoming, outgoing, server_hostname="127.0.0.1")
    settings: Any = {"ssl_certfile": certificate, "header_timeout_s": 2}
    async with running_gateway(tmp_path, **settings) as gateway:
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
        while not is_done(client):
            writer.write(outgoing.read())
            incoming.write(await reader.read(1 << 16))
        writer.write(outgoing.read())
        async with asyncio.timeout(20):  # asyncio waits for half a minute
            while await reader.read(1 << 16):
                pass
        writer.close()
    assert num_shed("late") == before + 1
