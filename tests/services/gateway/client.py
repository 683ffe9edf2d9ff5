"""Requests to a gateway with a scripted tokenizer, and their whole answers."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from services.gateway.service import GatewayService
from shared.wire.messages import ModelInfo, State
from tests.services.gateway.fakes import FakeTokenizer, Submitted, running_gateway, until

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HI: Any = [{"role": "user", "content": "Hi"}]


def with_settings(**settings: Any) -> pytest.MarkDecorator:
    """A test's gateway has ``settings``; a relative path is one in the test's folder."""
    return pytest.mark.parametrize("settings", [settings], ids=["-".join(settings)])


def with_model(model: ModelInfo) -> pytest.MarkDecorator:
    """A test's tokenizer has ``model``."""
    return pytest.mark.parametrize("model", [model], ids=["-".join(model.media) or "caller"])


@dataclass(frozen=True)
class Answer:
    status: int
    headers: Mapping[str, str]
    text: str

    @property
    def json(self) -> Any:
        return json.loads(self.text)

    @property
    def choices(self) -> list[Any]:
        choices: list[Any] = self.json["choices"]
        return choices

    @property
    def events(self) -> list[Any]:
        """Of a stream with its end."""
        *events, done, rest = self.text.split("\n\n")
        assert (done, rest) == ("data: [DONE]", "")
        return [json.loads(event.removeprefix("data: ")) for event in events]

    @property
    def error(self) -> dict[str, Any]:
        """The error object, after a check of its shape."""
        assert self.json.keys() == {"error"}
        error: dict[str, Any] = self.json["error"]
        assert error.keys() == {"message", "type", "param", "code"}
        assert error["message"]
        assert isinstance(error["type"], str)
        assert isinstance(error["code"], str)
        assert len(self.headers["X-Request-Id"]) == 32
        return error


Asked = asyncio.Task[Answer]


@dataclass(frozen=True)
class Client:
    gateway: GatewayService
    http: aiohttp.ClientSession
    tokenizer: FakeTokenizer

    async def send(self, method: str, path: str, /, **options: Any) -> Answer:
        """``options`` of aiohttp's request."""
        async with self.http.request(method, path, **options) as response:
            return Answer(response.status, response.headers, await response.text())

    async def get(self, path: str, /, **headers: str) -> Answer:
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        return await self.send("GET", path, headers=names)

    async def post(self, path: str, /, key: str = "", **body: Any) -> Answer:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        return await self.send("POST", path, json=body, headers=headers)

    async def refused(self, status: int, path: str, /, **body: Any) -> dict[str, Any]:
        """The error of a request that has this status."""
        answer = await self.post(path, **body)
        assert answer.status == status, answer.text
        return answer.error

    async def begun(self, path: str = TEXT, /, **body: Any) -> tuple[Asked, Submitted]:
        """A request that the tokenizer has received."""
        asked = asyncio.create_task(self.post(path, **body or {"prompt": "a"}))
        return asked, await self.tokenizer.submitted.get()

    async def accepted(self, path: str = TEXT, /, **body: Any) -> tuple[Asked, Submitted]:
        asked, request = await self.begun(path, **body)
        request.accept()
        return asked, request

    async def served(self, script: Awaitable[Any], path: str, /, **body: Any) -> Answer:
        """A good answer; ``script`` is the tokenizer's part."""
        answer, _ = await asyncio.gather(self._good(path, body), script)
        return answer

    async def answered(self, path: str, /, *texts: str, **body: Any) -> tuple[Answer, Submitted]:
        """A good answer of ``texts``."""
        return await asyncio.gather(self._good(path, body), self.tokenizer.answer(*texts))

    async def _good(self, path: str, body: dict[str, Any]) -> Answer:
        answer = await self.post(path, **body)
        assert answer.status == 200, answer.text
        return answer

    async def streaming(
        self, path: str = TEXT, /, first: str = "x", **body: Any
    ) -> tuple[aiohttp.ClientResponse, Submitted]:
        """A stream that has begun, with its ``first`` text."""
        body = {"prompt": "a", **body} if path == TEXT else body
        posting = asyncio.create_task(self.http.post(path, json={"stream": True, **body}))
        request = await self.tokenizer.accepted()
        if first:
            request.text(first)
        return await posting, request

    async def finish(self, asked: Asked, request: Submitted) -> Answer:
        request.finish()
        answer = await asked
        assert answer.status == 200, answer.text
        return answer


@asynccontextmanager
async def client_of(gateway: GatewayService, tokenizer: Any = None) -> AsyncIterator[Client]:
    url, headers = f"http://127.0.0.1:{gateway.port}", {"Content-Type": "application/json"}
    async with aiohttp.ClientSession(url, headers=headers) as http:
        yield Client(gateway, http, tokenizer)


@asynccontextmanager
async def serving(mesh_dir: Path, **settings: Any) -> AsyncIterator[GatewayService]:
    """A gateway that is ready."""
    async with running_gateway(mesh_dir, **settings) as gateway:
        await until(lambda: gateway.status().state == State.READY)
        yield gateway


async def raw_answer(
    gateway: GatewayService, *pieces: bytes, end: bytes = b"", pause_s: float = 0
) -> bytes:
    """The bytes that answer ``pieces``, up to ``end`` or to the connection's own end."""
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    for piece in pieces:
        writer.write(piece)
        await asyncio.sleep(pause_s)
    answer = await (reader.readuntil(end) if end else reader.read())
    writer.close()
    return answer


def raw_get(path: str, *headers: str) -> bytes:
    return "\r\n".join([f"GET {path} HTTP/1.1", "Host: localhost", *headers, "", ""]).encode()


def raw_post(path: str = TEXT, version: str = "1.1", **fields: Any) -> bytes:
    body = json.dumps(fields).encode()
    head = f"POST {path} HTTP/{version}\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body
