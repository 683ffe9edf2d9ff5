"""With keys only health is open, and a refusal reveals nothing."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from multidict import CIMultiDict
from openai import AsyncOpenAI, AuthenticationError
from prometheus_client import REGISTRY

from services.gateway.service import GatewayService
from shared.errors import ConfigError
from shared.wire.messages import State
from tests.services.gateway.fakes import FakeTokenizer, running_gateway, until
from tests.services.gateway.test_errors import error_of

KEYS = ["first-key", "second-key"]
TEXT = "/v1/completions"
GUARDED = [
    ("GET", "/metrics"),
    ("GET", "/v1/metrics"),
    ("GET", "/v1/mesh"),
    ("GET", "/load"),
    ("GET", "/version"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/fish"),
    ("POST", "/v1/chat/completions"),
    ("POST", TEXT),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("POST", "/abort_requests"),
    ("GET", "/no/such/path"),
    ("POST", "/health"),
    ("GET", "/health/"),
]


@pytest.fixture
async def gateway(tmp_path: Path, tokenizer: FakeTokenizer) -> AsyncIterator[GatewayService]:
    async with running_gateway(tmp_path, api_key=KEYS) as service:
        await until(lambda: service.status().state == State.READY)
        yield service


def bearing(key: str, scheme: str = "Bearer") -> dict[str, str]:
    return {"Authorization": f"{scheme} {key}"}


def client(gateway: GatewayService, key: str) -> AsyncOpenAI:
    url = f"http://127.0.0.1:{gateway.port}/v1"
    return AsyncOpenAI(base_url=url, api_key=key, max_retries=0)


@pytest.mark.parametrize("headers", [{}, bearing("third-key")])
async def test_every_route_is_closed_without_a_key(
    http: aiohttp.ClientSession, headers: dict[str, str]
) -> None:
    for method, path in GUARDED:
        async with http.request(method, path, headers=headers) as response:
            assert response.status == 401, path
            assert response.headers["WWW-Authenticate"] == "Bearer"
            error = await error_of(response)
        assert error["type"] == "invalid_request_error"
        assert (error["code"], error["param"]) == ("invalid_api_key", None)
        assert "third" not in error["message"]


async def test_every_route_is_open_with_one(http: aiohttp.ClientSession) -> None:
    for method, path in GUARDED:
        async with http.request(method, path, headers=bearing(KEYS[1])) as response:
            assert response.status != 401, path


async def test_monitoring_needs_no_key(http: aiohttp.ClientSession) -> None:
    for path in ("/health", "/ready", "/ping"):
        async with http.get(path) as response:
            assert response.status == 200, path


@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER", "Bearer "])
async def test_each_key_opens_however_the_scheme_is_written(
    http: aiohttp.ClientSession, scheme: str
) -> None:
    for key in KEYS:
        async with http.get("/v1/models", headers=bearing(key, scheme)) as response:
            assert response.status == 200, key


@pytest.mark.parametrize(
    "given",
    [
        b"first-key",
        b"Basic first-key",
        b"Bearer",
        b"Bearer ",
        b"Bearer first-key second-key",
        b"Bearer first-ke",
        b"Bearer FIRST-KEY",
        b"Bearer \xff\xfe",
        "Bearer schlüssel".encode(),
        b"\xff",
    ],
)
async def test_an_inexact_key_is_refused(gateway: GatewayService, given: bytes) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    writer.write(
        b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        b"Authorization: " + given + b"\r\n\r\n"
    )
    answer = await reader.read()
    writer.close()
    assert answer.startswith(b"HTTP/1.1 401")
    assert b'"code":"invalid_api_key"' in answer


async def test_openais_client_needs_a_key_and_reports_a_missing_one(
    gateway: GatewayService, tokenizer: FakeTokenizer
) -> None:
    async with client(gateway, "third-key") as openai:
        with pytest.raises(AuthenticationError) as caught:
            await openai.completions.create(model="fish", prompt="a")
        assert caught.value.code == "invalid_api_key"
    assert tokenizer.submitted.empty()
    async with client(gateway, KEYS[0]) as openai:
        done, _ = await asyncio.gather(
            openai.completions.create(model="fish", prompt="a"), tokenizer.answer("x")
        )
    assert done.choices[0].text == "x"


@pytest.mark.parametrize("more", [b"", b"Expect: 100-continue\r\n"])
async def test_the_body_is_not_waited_for(gateway: GatewayService, more: bytes) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n"
        + more
        + b"\r\n"
    )
    answer = await reader.readuntil(b"}}")
    writer.close()
    assert answer.startswith(b"HTTP/1.1 401")
    assert b"\r\nX-Request-Id: " in answer


async def test_a_refusal_is_counted_with_its_route(http: aiohttp.ClientSession) -> None:
    def count() -> float:
        labels = {"route": TEXT, "status": "401"}
        return REGISTRY.get_sample_value("shoal_http_requests_total", labels) or 0

    before = count()
    async with http.post(TEXT, headers={"X-Request-Id": "mine"}) as response:
        assert response.headers["X-Request-Id"] == "mine"
    assert count() == before + 1


async def test_a_request_tries_no_more_than_two_keys(http: aiohttp.ClientSession) -> None:
    for guesses, expected in ((["a", KEYS[1]], 200), (["a", "b", KEYS[1]], 401)):
        bearer, *others = guesses
        headers = CIMultiDict(bearing(bearer))
        for key in others:
            headers.add("X-Api-Key", key)
        async with http.get("/v1/models", headers=headers) as response:
            assert response.status == expected


class TestFile:
    @pytest.fixture
    def path(self, tmp_path: Path) -> Path:
        return tmp_path / "keys"

    async def statuses(self, tmp_path: Path, keys: list[str], **settings: Any) -> list[int]:
        statuses = []
        async with (
            running_gateway(tmp_path, **settings) as gateway,
            aiohttp.ClientSession(f"http://127.0.0.1:{gateway.port}") as http,
        ):
            for key in keys:
                async with http.get("/version", headers=bearing(key)) as response:
                    statuses.append(response.status)
        return statuses

    async def test_its_lines_are_keys_beside_the_settings_ones(
        self, tmp_path: Path, path: Path
    ) -> None:
        path.write_text("# für Ada\n\n  one \r\ntwo\t\n#three\n")
        settings = {"api_key_file": path, "api_key": ["four"]}
        keys = ["one", "two", "four", "three", "#three", "# für Ada", "five"]
        assert await self.statuses(tmp_path, keys, **settings) == [200] * 3 + [401] * 4

    async def test_a_secret_without_a_line_end_is_a_key(self, tmp_path: Path, path: Path) -> None:
        path.write_text("one")
        assert await self.statuses(tmp_path, ["one", ""], api_key_file=path) == [200, 401]

    @pytest.mark.parametrize(
        ("content", "words"),
        [
            (b"", "holds no key"),
            (b"# nobody yet\n\n", "holds no key"),
            (b"good\nsecret word\n", "line 2: after the key only max-open-requests=N"),
            (b"secret max-open-requests=0", "line 1: max-open-requests is '0'; expected a whole"),
            (b"secret max-open-requests=2,", "line 1: max-open-requests is '2,'; expected a"),
            (b"secret\xff\n", "line 1: expected 1 to 256 printable ASCII"),
            (b"secret" * 43, "line 1: expected 1 to 256 printable ASCII"),
        ],
    )
    async def test_one_that_would_guard_nothing_is_refused_and_not_quoted(
        self, tmp_path: Path, path: Path, content: bytes, words: str
    ) -> None:
        path.write_bytes(content)
        with pytest.raises(ConfigError, match=words) as caught:
            async with running_gateway(tmp_path, api_key_file=path):
                pass
        assert str(path) in str(caught.value)
        assert "secret" not in str(caught.value)

    async def test_one_that_cannot_be_read_is_refused_by_name(
        self, tmp_path: Path, path: Path
    ) -> None:
        for name in (path, tmp_path):
            with pytest.raises(ConfigError, match=f"api-key-file: {name}: "):
                async with running_gateway(tmp_path, api_key_file=name):
                    pass
