"""Images of other hosts, over HTTP: good ones reach the tokenizer, all others are a 400 that names
the field and says nothing of other machines."""

import asyncio
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest
from prometheus_client import REGISTRY

from services.gateway.media import fetch
from services.gateway.metrics import BUFFERED_BYTES
from shared.wire.messages import Lost, RequestKey
from tests.services.gateway.client import CHAT, Client, with_model
from tests.services.gateway.fakes import until
from tests.services.gateway.media.asking import FILE, SEER, image, user
from tests.services.gateway.media.image_hosts import ImageHost, Names, whole

PLACE = "messages[0].content[0].image_url.url"
MAX_BYTES = 64 << 10
TIMEOUT_S = 0.5
WITHIN_S = 20.0  # for a refusal on a busy machine
TOO_LARGE = f"the files of the request have more bytes than max-body-bytes = {MAX_BYTES}"
EXPECTED = "expected a data: URL such as data:image/png;base64,…, http:// or https://"

pytestmark = with_model(SEER)


@pytest.fixture
async def host() -> AsyncIterator[ImageHost]:
    async with ImageHost().serving() as host:
        yield host


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> Names:
    names = Names(monkeypatch)
    names.addresses["images.example"] = [["127.0.0.1"]]
    return names


@pytest.fixture
def more() -> dict[str, Any]:
    return {}


@pytest.fixture
def domains() -> list[str]:
    """``PORT`` is the host's."""
    return ["images.example:PORT", "127.0.0.1:PORT"]


@pytest.fixture
def settings(host: ImageHost, domains: list[str], more: dict[str, Any]) -> dict[str, Any]:
    allowed = [each.replace("PORT", str(host.port)) for each in domains]
    return {"max_body_bytes": MAX_BYTES, "allowed_media_domains": allowed} | more


def allowing(*domains: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("domains", [[*domains]], ids=["+".join(domains) or "none"])


def with_more(**settings: Any) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("more", [settings], ids=["-".join(settings)])


def chat(*urls: str) -> dict[str, Any]:
    return {"messages": [user(*({"type": "image_url", "image_url": {"url": u}} for u in urls))]}


def at(host: ImageHost, path: str = "/a.png", name: str = "127.0.0.1") -> str:
    return f"http://{name}:{host.port}{path}"


def named(host: ImageHost, path: str = "/a.png") -> str:
    return at(host, path, "images.example")


async def served(client: Client, *urls: str, **fields: Any) -> list[bytes]:
    """The files that reached the tokenizer for a request that is answered well."""
    _, request = await client.answered(CHAT, "a", **chat(*urls) | fields)
    return [each.tobytes() for each in request.files]


async def refused(client: Client, url: str) -> str:
    """The reason; nothing of the answer, of its host's address or of the mesh is in it."""
    async with asyncio.timeout(WITHIN_S):
        error = await client.refused(400, CHAT, **chat(url))
    assert (error["param"], error["type"]) == (PLACE, "invalid_request_error"), error
    assert error["message"].startswith(f"{PLACE} is ")
    reason: str = error["message"].partition("; ")[2]
    assert "secret" not in reason
    assert "127.0.0.1" not in reason
    assert client.tokenizer.submitted.empty()
    return reason


async def test_the_same_url_is_fetched_once_for_a_request(client: Client, host: ImageHost) -> None:
    first, second = at(host), at(host, "/b.png")
    body = chat(first, second, first)
    body["messages"].append(user(image(b"inside"), {"type": "image_url", "image_url": first}))
    files = await served(client, **body)
    assert BUFFERED_BYTES._value.get() == 0
    assert files == [FILE, b"other", FILE, b"inside", FILE]
    assert len(host.heads) == 2


async def test_a_replay_fetches_nothing(client: Client, host: ImageHost) -> None:
    asked, request = await client.accepted(CHAT, **chat(at(host)))
    request.peer.send(Lost([RequestKey(*request.key)], is_explained=True))
    again = await client.tokenizer.accepted()
    assert [each.tobytes() for each in again.files] == [FILE]
    again.text("a")
    await client.finish(asked, again)
    assert len(host.heads) == 1


@pytest.mark.parametrize(
    ("path", "file"), [("/chunked", b"other"), ("/until-close", b"other"), ("/redirect", FILE)]
)
async def test_good_answers_of_odd_forms(
    client: Client, host: ImageHost, names: Names, path: str, file: bytes
) -> None:
    assert await served(client, named(host, path)) == [file]


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
    client: Client, host: ImageHost, names: Names, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(fetch.FETCH_TIMEOUTS_S, "image", TIMEOUT_S)
    for path, text in BAD.items():
        assert text in await refused(client, named(host, path)), path
        assert await served(client, named(host)) == [FILE], path
    together = await asyncio.gather(*(refused(client, named(host, path)) for path in BAD))
    assert all(text in reason for text, reason in zip(BAD.values(), together, strict=True))
    assert BUFFERED_BYTES._value.get() == 0
    assert await served(client, named(host)) == [FILE]


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
    client: Client, host: ImageHost, names: Names
) -> None:
    for url, text in REFUSED.items():
        assert text in await refused(client, url.replace("PORT", str(host.port))), url
    assert not host.heads
    assert not names.asked


PRIVATE = ["127.0.0.1", "::1", "::ffff:127.0.0.1", "169.254.169.254", "10.0.0.1", "0.0.0.0"]


@pytest.mark.parametrize("domains", [["*"], ["images.example"]])
async def test_a_name_with_a_private_address_is_not_dialled(
    client: Client,
    host: ImageHost,
    names: Names,
    domains: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text = "its host has no public address, and none in allowed-media-domains"
    monkeypatch.setattr("services.gateway.media.allowed_hosts.PORTS", (80, host.port))
    for addresses in (*([each] for each in PRIVATE), ["127.0.0.1", "10.0.0.1"], []):
        names.addresses["images.example"] = [addresses]
        assert await refused(client, named(host)) == text, addresses
    if domains == ["*"]:
        for odd in ("2130706433", "0x7f000001", "127.1", "0177.0.0.1", "localhost"):
            await refused(client, at(host, name=odd))
    assert not host.heads


@allowing("images.example:PORT", "127.0.0.0/8")
async def test_a_network_opens_the_addresses_of_named_hosts_alone(
    client: Client, host: ImageHost, names: Names
) -> None:
    assert await served(client, named(host)) == [FILE]
    for literal in ("http://127.0.0.1/a.png", at(host)):
        assert "does not name its host" in await refused(client, literal)
    host.answers["/to-address"] = whole(b"", "302 Found", Location="http://127.0.0.2/")
    assert "it redirects to a URL" in await refused(client, named(host, "/to-address"))
    assert len(host.heads) == 2


async def test_the_address_that_is_dialled_is_the_one_that_was_checked(
    client: Client, host: ImageHost, names: Names
) -> None:
    """The name service gives another address at each lookup, as for DNS rebinding."""
    names.addresses["images.example"] = [["127.0.0.1"], ["127.0.0.2"], ["10.0.0.1"]]
    assert await served(client, named(host)) == [FILE]
    assert len(names.asked) == 1
    for _ in range(2):
        assert "no public address" in await refused(client, named(host))
    assert len(host.heads) == 1


async def test_proxies_of_the_environment_are_not_used(
    client: Client, host: ImageHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    assert await served(client, at(host)) == [FILE]


@allowing()
async def test_without_the_setting_nothing_is_fetched(client: Client, host: ImageHost) -> None:
    reason = await refused(client, at(host))
    assert reason.startswith("nothing is fetched (allowed-media-domains), expected a data: URL")
    assert not host.heads


OF_KEYS = with_more(api_key=["ann", "bob"], limit_mm_per_prompt={"image": 100})


@OF_KEYS
async def test_slow_hosts_of_one_key_hold_up_no_other(
    client: Client, host: ImageHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(fetch.FETCH_TIMEOUTS_S, "image", 1.0)
    slow = chat(*(at(host, f"/silent?{number}") for number in range(4 * fetch.NUM_FETCHES)))
    waiting = [asyncio.create_task(client.post(CHAT, key="ann", **slow)) for _ in range(2)]
    await until(lambda: len(host.heads) == fetch.NUM_FETCHES)
    assert await served(client, at(host), key="bob") == [FILE]
    assert {(await each).status for each in waiting} == {400}


@pytest.mark.slow
@OF_KEYS
@allowing("images.example:PORT", "silent.example:PORT", "127.0.0.1:PORT")
async def test_lookups_without_an_answer_of_one_key_hold_up_no_other(
    client: Client, host: ImageHost, names: Names, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(fetch.FETCH_TIMEOUTS_S, "image", 1.0)
    paths = [f"/{number}.png" for number in range(2 * fetch.NUM_LOOKUPS)]
    slow = chat(*(at(host, path, "silent.example") for path in paths))
    with names.silent("silent.example"):
        for _ in range(3):
            error = await client.refused(400, CHAT, key="ann", **slow)
            assert "was not fetched in 1 s" in error["message"]
        assert names.asked == ["silent.example"] * fetch.MAX_LOOKUPS_PER_KEY
        assert await served(client, named(host), key="bob") == [FILE]
        lookups = [each for each in threading.enumerate() if each.name == "resolve"]
        assert len(lookups) == fetch.MAX_LOOKUPS_PER_KEY
        assert all(each.daemon for each in lookups), "the process would end after them"


@with_more(accept_timeout_s=0.5)
async def test_a_fetch_that_does_not_begin_in_time_is_an_own_error(
    client: Client, host: ImageHost
) -> None:
    body = chat(*(at(host, f"/silent?{number}") for number in range(fetch.NUM_FETCHES + 1)))
    before = {result: count(result) for result in ("queued", "cut")}
    error = await client.refused(503, CHAT, **body)
    assert error["message"] == "files not loaded within 0.5 s (accept-timeout-s)"
    await until(lambda: count("cut") == before["cut"] + fetch.NUM_FETCHES)
    assert count("queued") == before["queued"] + 1


@with_more(max_body_bytes=2 * len(FILE) + 9)
async def test_all_files_of_a_request_share_the_limit(client: Client, host: ImageHost) -> None:
    body = chat(*(at(host, f"/a.png?{number}") for number in range(3)))
    error = await client.refused(400, CHAT, **body)
    assert f"max-body-bytes = {2 * len(FILE) + 9}" in error["message"]


def count(result: str) -> float:
    return REGISTRY.get_sample_value("shoal_media_fetches_total", {"result": result}) or 0


@allowing("127.0.0.1:PORT", "local.example", "no.example")
async def test_fetches_are_counted_by_result(client: Client, host: ImageHost, names: Names) -> None:
    names.addresses = {"local.example": [["127.0.0.2"]], "no.example": [[]]}
    results = {"/a.png": "fetched", "/missing": "status", "/large": "too_large", "/ssh": "failed"}
    odd = {"//local.example": "refused", "//no.example": "failed", "/to-private": "refused"}
    for path, result in (results | odd).items():
        before, url = count(result), f"http:{path}" if path[1] == "/" else at(host, path)
        if result == "fetched":
            await served(client, url)
        else:
            await client.post(CHAT, **chat(url))
        assert count(result) == before + 1, path
