"""Images of other hosts, over HTTP: good ones reach the tokenizer, all others are a 400 that names
the field and says nothing of other machines."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from prometheus_client import REGISTRY

from services.gateway.media import fetch
from services.gateway.metrics import BUFFERED_BYTES
from shared.wire.messages import Lost, RequestKey, State
from tests.services.gateway.fakes import (
    FakeTokenizer,
    Submitted,
    fake_tokenizer,
    running_gateway,
    until,
)
from tests.services.gateway.media.asking import FILE, SEER, image, user
from tests.services.gateway.media.image_hosts import ImageHost, Names, whole

CHAT = "/v1/chat/completions"
PLACE = "messages[0].content[0].image_url.url"
MAX_BYTES = 64 << 10
TIMEOUT_S = 0.5
WITHIN_S = 20.0  # for a refusal on a busy machine
TOO_LARGE = f"the files of the request have more bytes than max-body-bytes = {MAX_BYTES}"
EXPECTED = "expected a data: URL such as data:image/png;base64,…, http:// or https://"

Ask = Callable[..., Any]


@pytest.fixture
async def tokenizer(tmp_path: Path) -> AsyncIterator[FakeTokenizer]:
    async with fake_tokenizer(tmp_path, model=SEER) as fake:
        yield fake


@pytest.fixture
async def host() -> AsyncIterator[ImageHost]:
    async with ImageHost().serving() as host:
        yield host


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> Names:
    return Names(monkeypatch)


@asynccontextmanager
async def asking(tmp_path: Path, *domains: str, **settings: Any) -> AsyncIterator[Ask]:
    """A gateway that fetches from ``domains``; yields a function that posts."""
    settings = {"max_body_bytes": MAX_BYTES, "allowed_media_domains": [*domains]} | settings
    async with (
        running_gateway(tmp_path, **settings) as gateway,
        aiohttp.ClientSession(f"http://127.0.0.1:{gateway.port}") as http,
    ):
        await until(lambda: gateway.status().state == State.READY)

        async def ask(body: Any, path: str = CHAT, key: str = "") -> tuple[int, Any]:
            headers = {"Authorization": f"Bearer {key}"} if key else {}
            async with http.post(path, json=body, headers=headers) as response:
                return response.status, await response.json()

        yield ask


def named(host: ImageHost, *more: str) -> tuple[str, ...]:
    return (f"images.example:{host.port}", f"127.0.0.1:{host.port}", *more)


def chat(*urls: str) -> dict[str, Any]:
    return {"messages": [user(*({"type": "image_url", "image_url": {"url": u}} for u in urls))]}


async def served(tokenizer: FakeTokenizer, asked: Any) -> list[bytes]:
    """The files that reached the tokenizer for a request that is answered well."""
    running = asyncio.ensure_future(asked)
    getting = asyncio.ensure_future(tokenizer.submitted.get())
    await asyncio.wait((running, getting), return_when=asyncio.FIRST_COMPLETED)
    assert getting.done(), running.result()
    request: Submitted = getting.result()
    request.accept()
    request.text("a")
    request.finish()
    status, _ = await running
    assert status == 200
    return [each.tobytes() for each in request.files]


async def refused(ask: Ask, url: str, tokenizer: FakeTokenizer) -> str:
    """The reason; nothing of the answer, of its host's address or of the mesh is in it."""
    async with asyncio.timeout(WITHIN_S):
        status, reply = await ask(chat(url))
    error = reply["error"]
    assert (status, error["param"], error["type"]) == (400, PLACE, "invalid_request_error"), error
    assert error["message"].startswith(f"{PLACE} is ")
    reason: str = error["message"].partition("; ")[2]
    assert "secret" not in reason
    assert "127.0.0.1" not in reason
    assert tokenizer.submitted.empty()
    return reason


async def test_the_same_url_is_fetched_once_for_a_request(
    tmp_path: Path, tokenizer: FakeTokenizer, host: ImageHost
) -> None:
    first, second = (f"http://127.0.0.1:{host.port}/{name}.png" for name in "ab")
    body = chat(first, second, first)
    body["messages"].append(user(image(b"inside"), {"type": "image_url", "image_url": first}))
    async with asking(tmp_path, f"127.0.0.1:{host.port}") as ask:
        files = await served(tokenizer, ask(body))
        assert BUFFERED_BYTES._value.get() == 0
    assert files == [FILE, b"other", FILE, b"inside", FILE]
    assert len(host.heads) == 2


async def test_a_replay_fetches_nothing(
    tmp_path: Path, tokenizer: FakeTokenizer, host: ImageHost
) -> None:
    url = f"http://127.0.0.1:{host.port}/a.png"
    async with asking(tmp_path, f"127.0.0.1:{host.port}") as ask:
        asked = asyncio.create_task(ask(chat(url)))
        request = await tokenizer.submitted.get()
        request.accept()
        request.peer.send(Lost([RequestKey(*request.key)], is_explained=True))
        again = await tokenizer.submitted.get()
        assert [each.tobytes() for each in again.files] == [FILE]
        again.accept()
        again.text("a")
        again.finish()
        assert (await asked)[0] == 200
    assert len(host.heads) == 1


@pytest.mark.parametrize(
    ("path", "file"),
    [("/chunked", b"other"), ("/until-close", b"other"), ("/redirect", FILE)],
)
async def test_good_answers_of_odd_forms(
    tmp_path: Path,
    tokenizer: FakeTokenizer,
    host: ImageHost,
    names: Names,
    path: str,
    file: bytes,
) -> None:
    names.addresses["images.example"] = [["127.0.0.1"]]
    async with asking(tmp_path, *named(host)) as ask:
        url = f"http://images.example:{host.port}{path}"
        assert await served(tokenizer, ask(chat(url))) == [file]


BAD = {
    "/missing": "its host answers 404",
    "/failed": "its host answers 500",
    "/part": "its host answers 206",
    "/none": "its host answers 204",
    "/empty": "it has no data",
    "/short": "its host sent a part of it",
    "/half-chunk": "its host sent a part of it",
    "/odd-chunk": "does not answer by HTTP",
    "/large": TOO_LARGE,
    "/negative": "does not answer by HTTP",
    "/two-lengths": "does not answer by HTTP",
    "/gzip": "its host sends it compressed",
    "/br": "its host sends it compressed",
    "/header-bomb": "does not answer by HTTP",
    "/headers": "does not answer by HTTP",
    "/ssh": "does not answer by HTTP",
    "/nothing": "does not answer by HTTP",
    "/silent": f"it was not fetched in {TIMEOUT_S} s",
    "/slow-head": f"it was not fetched in {TIMEOUT_S} s",
    "/slow": f"it was not fetched in {TIMEOUT_S} s",
    "/endless": TOO_LARGE,
    "/endless-chunks": TOO_LARGE,
    "/loop": "it has more than 3 redirects",
    "/nowhere": "its host answers 302 without Location",
    "/odd-redirect": "does not answer by HTTP",
    "/to-file": "it redirects to a URL that allowed-media-domains does not allow",
    "/to-metadata": "it redirects to a URL that allowed-media-domains does not allow",
    "/to-private": "it redirects to a URL that allowed-media-domains does not allow",
    "/to-other-host": "it redirects to a URL that allowed-media-domains does not allow",
    "/to-other-port": "it redirects to a URL that allowed-media-domains does not allow",
    "/to-user": "it redirects to a URL that allowed-media-domains does not allow",
}


async def test_bad_answers_are_refused_and_the_next_image_is_served(
    tmp_path: Path,
    tokenizer: FakeTokenizer,
    host: ImageHost,
    names: Names,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(fetch.FETCH_TIMEOUTS_S, "image", TIMEOUT_S)
    names.addresses["images.example"] = [["127.0.0.1"]]
    base = f"http://images.example:{host.port}"
    async with asking(tmp_path, *named(host)) as ask:
        for path, text in BAD.items():
            assert text in await refused(ask, base + path, tokenizer), path
            assert await served(tokenizer, ask(chat(f"{base}/a.png"))) == [FILE], path
        together = await asyncio.gather(*(refused(ask, base + path, tokenizer) for path in BAD))
        assert all(text in reason for text, reason in zip(BAD.values(), together, strict=True))
        assert BUFFERED_BYTES._value.get() == 0
        assert await served(tokenizer, ask(chat(f"{base}/a.png"))) == [FILE]


REFUSED = {
    "file:///etc/passwd": EXPECTED,
    "gopher://images.example/a": EXPECTED,
    "ftp://images.example/a.png": EXPECTED,
    "javascript:alert(1)": EXPECTED,
    " http://images.example/a.png": EXPECTED,
    "//images.example/a.png": EXPECTED,
    "http://": "does not name its host",
    "http:images.example": "does not name its host",
    "http://images.example:99999/a.png": "it is no URL",
    "http://[::bad/a.png": "it is no URL",
    "http://me:pass@images.example:PORT/a.png": "it has a user or a password",
    "http://images.example@evil.example/a.png": "it has a user or a password",
    "http://evil.example/images.example": "does not name its host",
    "http://images.example:22/a.png": "does not name its host at port 22",
    "http://images.example\\.evil.example:PORT/a.png": "",
    "http://localhost:PORT/a.png": "does not name its host",
    "http://127.1:PORT/a.png": "does not name its host",
    "http://2130706433:PORT/a.png": "does not name its host",
    "http://0x7f000001:PORT/a.png": "does not name its host",
    "http://0177.0.0.1:PORT/a.png": "",
    "http://[::1]:PORT/a.png": "does not name its host",
    "http://[::ffff:10.0.0.1]:PORT/a.png": "does not name its host",
    "http://169.254.169.254/latest/meta-data": "does not name its host",
    "http://images.example:PORT/" + "a" * 9000: "it has more than 8192 bytes",
}


async def test_urls_of_other_places_are_refused_and_nothing_is_asked(
    tmp_path: Path, tokenizer: FakeTokenizer, host: ImageHost, names: Names
) -> None:
    names.addresses["images.example"] = [["127.0.0.1"]]
    async with asking(tmp_path, *named(host)) as ask:
        for url, text in REFUSED.items():
            reason = await refused(ask, url.replace("PORT", str(host.port)), tokenizer)
            assert text in reason, url
        assert not host.heads
        assert not names.asked


PRIVATE = ["127.0.0.1", "::1", "::ffff:127.0.0.1", "169.254.169.254", "10.0.0.1", "0.0.0.0"]


@pytest.mark.parametrize("domains", [["*"], ["images.example"]])
async def test_a_name_with_a_private_address_is_not_dialled(
    tmp_path: Path,
    tokenizer: FakeTokenizer,
    host: ImageHost,
    names: Names,
    domains: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text = "its host has no public address, and none in allowed-media-domains"
    monkeypatch.setattr("services.gateway.media.allowed_hosts.PORTS", (80, host.port))
    url = f"http://images.example:{host.port}/a.png"
    async with asking(tmp_path, *domains) as ask:
        for address in PRIVATE:
            names.addresses["images.example"] = [[address]]
            assert await refused(ask, url, tokenizer) == text, address
        names.addresses["images.example"] = [["127.0.0.1", "10.0.0.1"]]
        assert await refused(ask, url, tokenizer) == text
        names.addresses["images.example"] = [[]]
        assert await refused(ask, url, tokenizer) == text
        if domains == ["*"]:
            for odd in ("2130706433", "0x7f000001", "127.1", "0177.0.0.1", "localhost"):
                await refused(ask, f"http://{odd}:{host.port}/a.png", tokenizer)
    assert not host.heads


async def test_a_network_opens_the_addresses_of_named_hosts_alone(
    tmp_path: Path, tokenizer: FakeTokenizer, host: ImageHost, names: Names
) -> None:
    names.addresses["images.example"] = [["127.0.0.1"]]
    async with asking(tmp_path, f"images.example:{host.port}", "127.0.0.0/8") as ask:
        url = f"http://images.example:{host.port}/a.png"
        assert await served(tokenizer, ask(chat(url))) == [FILE]
        for literal in ("http://127.0.0.1/a.png", f"http://127.0.0.1:{host.port}/a.png"):
            assert "does not name its host" in await refused(ask, literal, tokenizer)
        host.answers["/to-address"] = whole(b"", "302 Found", Location="http://127.0.0.2/")
        url = f"http://images.example:{host.port}/to-address"
        assert "it redirects to a URL" in await refused(ask, url, tokenizer)
    assert len(host.heads) == 2


async def test_the_address_that_is_dialled_is_the_one_that_was_checked(
    tmp_path: Path, tokenizer: FakeTokenizer, host: ImageHost, names: Names
) -> None:
    """The name service gives another address at each lookup, as for DNS rebinding."""
    names.addresses["images.example"] = [["127.0.0.1"], ["127.0.0.2"], ["10.0.0.1"]]
    async with asking(tmp_path, *named(host)) as ask:
        url = f"http://images.example:{host.port}/a.png"
        assert await served(tokenizer, ask(chat(url))) == [FILE]
        assert len(names.asked) == 1
        for _ in range(2):
            assert "no public address" in await refused(ask, url, tokenizer)
    assert len(host.heads) == 1


async def test_proxies_of_the_environment_are_not_used(
    tmp_path: Path,
    tokenizer: FakeTokenizer,
    host: ImageHost,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    async with asking(tmp_path, f"127.0.0.1:{host.port}") as ask:
        url = f"http://127.0.0.1:{host.port}/a.png"
        assert await served(tokenizer, ask(chat(url))) == [FILE]


async def test_without_the_setting_nothing_is_fetched(
    tmp_path: Path, tokenizer: FakeTokenizer, host: ImageHost
) -> None:
    async with asking(tmp_path) as ask:
        url = f"http://127.0.0.1:{host.port}/a.png"
        reason = await refused(ask, url, tokenizer)
    assert reason.startswith("nothing is fetched (allowed-media-domains), expected a data: URL")
    assert not host.heads


async def test_slow_hosts_of_one_key_hold_up_no_other(
    tmp_path: Path,
    tokenizer: FakeTokenizer,
    host: ImageHost,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(fetch.FETCH_TIMEOUTS_S, "image", 1.0)
    base = f"http://127.0.0.1:{host.port}"
    slow = chat(*(f"{base}/silent?{number}" for number in range(4 * fetch.NUM_FETCHES)))
    settings = {"api_key": ["ann", "bob"], "limit_mm_per_prompt": {"image": 100}}
    async with asking(tmp_path, f"127.0.0.1:{host.port}", **settings) as ask:
        waiting = [asyncio.create_task(ask(slow, key="ann")) for _ in range(2)]
        await until(lambda: len(host.heads) == fetch.NUM_FETCHES)
        assert await served(tokenizer, ask(chat(f"{base}/a.png"), key="bob")) == [FILE]
        assert {(await each)[0] for each in waiting} == {400}


@pytest.mark.slow
async def test_lookups_without_an_answer_of_one_key_hold_up_no_other(
    tmp_path: Path,
    tokenizer: FakeTokenizer,
    host: ImageHost,
    names: Names,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(fetch.FETCH_TIMEOUTS_S, "image", 1.0)
    names.addresses["images.example"] = [["127.0.0.1"]]
    slow = chat(
        *(f"http://silent.example:{host.port}/{n}.png" for n in range(2 * fetch.NUM_LOOKUPS))
    )
    settings = {"api_key": ["ann", "bob"], "limit_mm_per_prompt": {"image": 100}}
    with names.silent("silent.example"):
        async with asking(tmp_path, *named(host, f"silent.example:{host.port}"), **settings) as ask:
            for _ in range(3):
                status, reply = await ask(slow, key="ann")
                assert (status, "was not fetched in 1 s" in reply["error"]["message"]) == (
                    400,
                    True,
                )
            assert names.asked == ["silent.example"] * fetch.MAX_LOOKUPS_PER_KEY
            url = f"http://images.example:{host.port}/a.png"
            assert await served(tokenizer, ask(chat(url), key="bob")) == [FILE]
        lookups = [each for each in threading.enumerate() if each.name == "resolve"]
        assert len(lookups) == fetch.MAX_LOOKUPS_PER_KEY
        assert all(each.daemon for each in lookups), "the process would end after them"


async def test_a_fetch_that_does_not_begin_in_time_is_an_own_error(
    tmp_path: Path, tokenizer: FakeTokenizer, host: ImageHost
) -> None:
    base = f"http://127.0.0.1:{host.port}/silent"
    body = chat(*(f"{base}?{number}" for number in range(fetch.NUM_FETCHES + 1)))
    before = {result: count(result) for result in ("queued", "cut")}
    async with asking(tmp_path, f"127.0.0.1:{host.port}", accept_timeout_s=0.5) as ask:
        status, reply = await ask(body)
    assert (status, reply["error"]["message"]) == (
        503,
        "files not loaded within 0.5 s (accept-timeout-s)",
    )
    assert count("queued") == before["queued"] + 1
    assert count("cut") == before["cut"] + fetch.NUM_FETCHES


async def test_all_files_of_a_request_share_the_limit(
    tmp_path: Path, tokenizer: FakeTokenizer, host: ImageHost
) -> None:
    base = f"http://127.0.0.1:{host.port}/a.png"
    body = chat(*(f"{base}?{number}" for number in range(3)))
    async with asking(tmp_path, f"127.0.0.1:{host.port}", max_body_bytes=2 * len(FILE) + 9) as ask:
        status, reply = await ask(body)
    assert status == 400
    assert f"max-body-bytes = {2 * len(FILE) + 9}" in reply["error"]["message"]


def count(result: str) -> float:
    return REGISTRY.get_sample_value("shoal_media_fetches_total", {"result": result}) or 0


async def test_fetches_are_counted_by_result(
    tmp_path: Path, tokenizer: FakeTokenizer, host: ImageHost, names: Names
) -> None:
    results = {"/a.png": "fetched", "/missing": "status", "/large": "too_large", "/ssh": "failed"}
    names.addresses = {"local.example": [["127.0.0.2"]], "no.example": [[]]}
    base = f"http://127.0.0.1:{host.port}"
    odd = {"//local.example": "refused", "//no.example": "failed", "/to-private": "refused"}
    async with asking(tmp_path, f"127.0.0.1:{host.port}", "local.example", "no.example") as ask:
        for path, result in (results | odd).items():
            before, url = count(result), f"http:{path}" if path[1] == "/" else base + path
            if result == "fetched":
                await served(tokenizer, ask(chat(url)))
            else:
                await ask(chat(url))
            assert count(result) == before + 1, path
