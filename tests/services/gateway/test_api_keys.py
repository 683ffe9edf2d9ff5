"""With keys only health is open, and a refusal reveals nothing."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from multidict import CIMultiDict
from openai import AuthenticationError
from prometheus_client import REGISTRY

from services.gateway.service import GatewayService
from shared.errors import ConfigError
from tests.services.gateway import openai_client
from tests.services.gateway.client import CHAT, TEXT, Client, client_of, raw_answer, raw_get
from tests.services.gateway.fakes import FakeTokenizer, running_gateway

KEYS = ["first-key", "second-key"]
GUARDED = [
    *(("GET", path) for path in ("/metrics", "/v1/metrics", "/v1/mesh", "/load", "/version")),
    *(("GET", path) for path in ("/v1/models", "/v1/models/fish", "/no/such/path", "/health/")),
    *(("POST", path) for path in (CHAT, TEXT, "/tokenize", "/detokenize", "/abort_requests")),
    ("POST", "/health"),
]


@pytest.fixture
def settings() -> dict[str, Any]:
    return {"api_key": KEYS}


def bearing(key: str, scheme: str = "Bearer") -> dict[str, str]:
    return {"Authorization": f"{scheme} {key}"}


@pytest.mark.parametrize("headers", [{}, bearing("third-key")], ids=["no key", "another key"])
async def test_every_route_is_closed_without_a_key(client: Client, headers: dict[str, str]) -> None:
    for method, path in GUARDED:
        answer = await client.send(method, path, headers=headers)
        assert answer.status == 401, path
        assert answer.headers["WWW-Authenticate"] == "Bearer"
        error = answer.error
        assert error["type"] == "invalid_request_error"
        assert (error["code"], error["param"]) == ("invalid_api_key", None)
        assert "third" not in error["message"]


async def test_every_route_is_open_with_one(client: Client) -> None:
    for method, path in GUARDED:
        answer = await client.send(method, path, headers=bearing(KEYS[1]))
        assert answer.status != 401, path
    for path in ("/health", "/ready", "/ping"):
        assert (await client.get(path)).status == 200, "monitoring needs no key"


@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER", "Bearer "])
async def test_each_key_opens_however_the_scheme_is_written(client: Client, scheme: str) -> None:
    for key in KEYS:
        assert (await client.get("/v1/models", **bearing(key, scheme))).status == 200, key


@pytest.mark.parametrize(
    "given",
    [
        b"first-key", b"Basic first-key", b"Bearer", b"Bearer ", b"Bearer first-key second-key",
        b"Bearer first-ke", b"Bearer FIRST-KEY", b"Bearer \xff\xfe", "Bearer schlüssel".encode(),
        b"\xff",
    ],
)  # fmt: skip
async def test_an_inexact_key_is_refused(gateway: GatewayService, given: bytes) -> None:
    head = raw_get("/v1/models", "Connection: close")[:-2]
    answer = await raw_answer(gateway, head + b"Authorization: " + given + b"\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 401")
    assert b'"code":"invalid_api_key"' in answer


async def test_openais_client_needs_a_key_and_reports_a_missing_one(
    gateway: GatewayService, tokenizer: FakeTokenizer
) -> None:
    async with openai_client.client_of(gateway, "third-key") as openai:
        with pytest.raises(AuthenticationError) as caught:
            await openai.completions.create(model="fish", prompt="a")
        assert caught.value.code == "invalid_api_key"
    assert tokenizer.submitted.empty()
    async with openai_client.client_of(gateway, KEYS[0]) as openai:
        done, _ = await asyncio.gather(
            openai.completions.create(model="fish", prompt="a"), tokenizer.answer("x")
        )
    assert done.choices[0].text == "x"


@pytest.mark.parametrize("more", [b"", b"Expect: 100-continue\r\n"])
async def test_the_body_is_not_waited_for(gateway: GatewayService, more: bytes) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n"
    answer = await raw_answer(gateway, head + more + b"\r\n", end=b"}}")
    assert answer.startswith(b"HTTP/1.1 401")
    assert b"\r\nX-Request-Id: " in answer


async def test_a_refusal_is_counted_with_its_route(client: Client) -> None:
    def count() -> float:
        labels = {"route": TEXT, "status": "401"}
        return REGISTRY.get_sample_value("shoal_http_requests_total", labels) or 0

    before = count()
    answer = await client.send("POST", TEXT, headers={"X-Request-Id": "mine"})
    assert answer.headers["X-Request-Id"] == "mine"
    assert count() == before + 1


async def test_a_request_tries_no_more_than_two_keys(client: Client) -> None:
    for guesses, expected in ((["a", KEYS[1]], 200), (["a", "b", KEYS[1]], 401)):
        bearer, *others = guesses
        headers = CIMultiDict(bearing(bearer))
        for key in others:
            headers.add("X-Api-Key", key)
        assert (await client.send("GET", "/v1/models", headers=headers)).status == expected


class TestFile:
    @pytest.fixture
    def path(self, tmp_path: Path) -> Path:
        return tmp_path / "keys"

    async def statuses(self, path: Path, keys: list[str], **settings: Any) -> list[int]:
        settings = {"api_key_file": path} | settings
        async with running_gateway(path.parent, **settings) as gateway, client_of(gateway) as http:
            return [(await http.get("/version", **bearing(key))).status for key in keys]

    async def test_its_lines_are_keys_beside_the_settings_ones(self, path: Path) -> None:
        path.write_text("# für Ada\n\n  one \r\ntwo\t\n#three\n")
        keys = ["one", "two", "four", "three", "#three", "# für Ada", "five"]
        assert await self.statuses(path, keys, api_key=["four"]) == [200] * 3 + [401] * 4

    async def test_a_secret_without_a_line_end_is_a_key(self, path: Path) -> None:
        path.write_text("one")
        assert await self.statuses(path, ["one", ""]) == [200, 401]

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
        self, path: Path, content: bytes, words: str
    ) -> None:
        path.write_bytes(content)
        with pytest.raises(ConfigError, match=words) as caught:
            await self.statuses(path, [])
        assert str(path) in str(caught.value)
        assert "secret" not in str(caught.value)

    async def test_one_that_cannot_be_read_is_refused_by_name(
        self, tmp_path: Path, path: Path
    ) -> None:
        for name in (path, tmp_path):
            with pytest.raises(ConfigError, match=f"api-key-file: {name}: "):
                await self.statuses(path, [], api_key_file=name)
