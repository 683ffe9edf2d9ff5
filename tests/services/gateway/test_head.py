"""An answer to HEAD has no body on any route: bytes after it would be read as the connection's next
answer."""

import asyncio
from collections.abc import AsyncIterator
from email import message_from_string
from email.message import Message
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from services.gateway import service
from services.gateway.app import make_app
from services.gateway.http import client as http_client
from services.gateway.service import GatewayService
from tests.services.gateway.client import Client, serving
from tests.services.gateway.fakes import MODEL, FakeTokenizer

CONTENT = b"HTTP/1.1 200 OK\r\nContent-Length: 7\r\n\r\nforeign"
PONG = b'{"status":"alive"}'


async def by_client(request: web.Request) -> web.StreamResponse:
    client = http_client.Client(request)
    await client.begin({"Content-Type": "text/plain"})
    await client.write(CONTENT)
    return await client.end()


async def by_stream(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse()
    await response.prepare(request)
    await response.write(CONTENT)
    await response.write_eof(CONTENT)
    return response


async def whole(request: web.Request) -> web.StreamResponse:
    return web.Response(body=CONTENT)


async def compressed(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse()
    response.enable_compression(web.ContentCoding.gzip)
    await response.prepare(request)
    await response.write(CONTENT)
    return response


FUTURE = (by_client, by_stream, whole, compressed)
"""Kinds of answers a route may have."""


@pytest.fixture
async def gateway(
    tmp_path: Path, tokenizer: FakeTokenizer, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[GatewayService]:
    """With every optional route, and with routes of ``FUTURE``."""

    def make(**arguments: Any) -> web.Application:
        app = make_app(**arguments)
        app.add_routes([web.get(f"/future/{each.__name__}", each) for each in FUTURE])
        return app

    monkeypatch.setattr(service, "make_app", make)
    paths = {"batch_dir": tmp_path / "batches", "response_store": tmp_path / "responses"}
    more: Any = {"instance": "g1", "enable_tokenizer_info_endpoint": True}
    async with serving(tmp_path, **paths, **more) as gateway:
        yield gateway


@pytest.fixture
async def names(client: Client) -> dict[str, str]:
    """Values for the names in paths: an existing file, response and model."""
    form = aiohttp.FormData({"purpose": "batch"})
    form.add_field("file", CONTENT, filename="answers.jsonl")
    async with aiohttp.ClientSession(f"http://127.0.0.1:{client.gateway.port}") as http:
        file = await (await http.post("/v1/files", data=form)).json()
    kept, _ = await client.answered("/v1/responses", "x", input="Hi")
    found = {"file_id": file["id"], "response_id": kept.json["id"], "name": MODEL.names[0]}
    return found | {"id": "none", "batch_id": "none"}


def paths_of(gateway: GatewayService, names: dict[str, str]) -> list[str]:
    """One path of each route."""
    resources = gateway._runner.app.router.resources()
    return sorted({resource.canonical.format(**names) for resource in resources})


class KeptConnection:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def head(self, method: str, path: str) -> Message:
        """The headers of an answer, with its status as ``Status``."""
        self._writer.write(f"{method} {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        lines = await self._reader.readuntil(b"\r\n\r\n")
        status, _, fields = lines.decode().partition("\r\n")
        assert status.startswith("HTTP/1.1 "), path
        return message_from_string(f"Status: {status[9:12]}\r\n{fields}")

    async def get(self, path: str) -> bytes:
        head = await self.head("GET", path)
        return await self._reader.readexactly(int(head["Content-Length"]))


@pytest.fixture
async def connection(gateway: GatewayService) -> AsyncIterator[KeptConnection]:
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    yield KeptConnection(reader, writer)
    writer.close()


async def test_no_route_sends_a_body_after_a_head(
    gateway: GatewayService, connection: KeptConnection, names: dict[str, str]
) -> None:
    statuses = {}
    for path in paths_of(gateway, names):
        statuses[path] = (await connection.head("HEAD", path))["Status"]
        assert await connection.get("/ping") == PONG, path
    answered = {path for path, status in statuses.items() if status == "200"}
    assert {f"/future/{handler.__name__}" for handler in FUTURE} <= answered
    assert {"/", "/v1/models", f"/v1/files/{names['file_id']}/content"} <= answered
    assert f"/v1/responses/{names['response_id']}" in answered


async def test_the_head_of_a_file_states_its_length(
    connection: KeptConnection, names: dict[str, str]
) -> None:
    path = f"/v1/files/{names['file_id']}/content"
    head = await connection.head("HEAD", path)
    assert (head["Status"], head["Content-Length"]) == ("200", str(len(CONTENT)))
    assert await connection.get(path) == CONTENT
