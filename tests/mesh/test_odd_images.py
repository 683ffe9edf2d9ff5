"""Odd images through real processes: a bad one is a 400 that names its field, and the next request
is answered; a good one of an odd form gives the same text as the plain one."""

import asyncio
import base64
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import pytest_asyncio
from aiohttp import web

from benchmarks.harness.fleet import Fleet, running_fleet
from tests.media.checkpoints import save_checkpoint
from tests.media.odd_files import MAX_PIXELS, PICTURE, bad_files, good_files, same_files, saved
from tests.mesh.forks import fork
from tests.mesh.test_images import SETTINGS, Client, client_of

PLAIN = saved(PICTURE, "PNG")
WITHIN_S = 60.0  # on a busy machine
PLACE = "messages[0].content[0].image_url.url"
REASONS = (
    "is no image in JPEG, PNG, WebP or GIF",
    "is an image that cannot be decoded",
    f"pixels; the limit is {MAX_PIXELS} (max-image-pixels)",
    "one side may be 200 times the other",
    "has no data",
)
FILES = {"/plain.png": PLAIN, "/page.png": b"<!doctype html>secret"}


@asynccontextmanager
async def image_host() -> AsyncIterator[int]:
    """Its port; it serves FILES."""

    async def answer(request: web.Request) -> web.Response:
        if request.path not in FILES:
            raise web.HTTPNotFound(text="secret")
        return web.Response(body=FILES[request.path], content_type="image/png")

    runner = web.ServerRunner(web.Server(answer))  # type: ignore[arg-type]
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def host() -> AsyncIterator[int]:
    async with image_host() as port:
        yield port


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet(host: int, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Fleet]:
    folder = tmp_path_factory.mktemp("qwen2.5-vl")
    save_checkpoint(folder)
    settings = {
        "MODEL": str(folder),
        "MAX_IMAGE_PIXELS": str(MAX_PIXELS),
        "ALLOWED_MEDIA_DOMAINS": f"127.0.0.1:{host},nowhere.invalid",
    }
    directory = tmp_path_factory.mktemp("fleet")
    async with running_fleet(directory, SETTINGS | settings, fork) as fleet:
        await fleet.start_all(scheduler=1, worker=1, tokenizer=1, gateway=1)
        yield fleet


@pytest_asyncio.fixture(loop_scope="module")
async def client(fleet: Fleet) -> AsyncIterator[Client]:
    async with client_of(fleet) as client:
        yield client


pytestmark = pytest.mark.asyncio(loop_scope="module")


def chat(url: str) -> list[dict[str, Any]]:
    part = {"type": "image_url", "image_url": {"url": url}}
    return [{"role": "user", "content": [part, {"type": "text", "text": "Describe it."}]}]


def data_url(file: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(file).decode()}"


async def refusal(client: Client, url: str) -> str:
    async with asyncio.timeout(WITHIN_S):
        status, error = await client.failure({"messages": chat(url)})
    assert (status, error["param"]) == (400, PLACE), error
    assert error["message"].startswith(PLACE)
    assert "secret" not in error["message"]
    return str(error["message"])


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_bad_files_are_refused_and_the_next_image_is_served(client: Client) -> None:
    bad = bad_files()
    assert len(bad) > 60
    expected = await client.text(chat(data_url(PLAIN)))
    for start in range(0, len(bad), 8):
        names = [*bad][start : start + 8]
        found = await asyncio.gather(*(refusal(client, data_url(bad[name])) for name in names))
        for name, reason in zip(names, found, strict=True):
            assert reason.endswith(REASONS), (name, reason)
        assert await client.text(chat(data_url(PLAIN)), max_tokens=4) in expected
    assert await client.text(chat(data_url(PLAIN))) == expected


@pytest.mark.timeout(600)
async def test_good_files_of_odd_forms_are_answered(client: Client) -> None:
    expected = await client.text(chat(data_url(PLAIN)))
    same = {name: await client.text(chat(data_url(file))) for name, file in same_files().items()}
    assert same == dict.fromkeys(same, expected)
    for name, file in good_files().items():
        assert await client.text(chat(data_url(file))), name


async def test_fetched_images_match_the_request(client: Client, host: int) -> None:
    expected = await client.text(chat(data_url(PLAIN)))
    base = f"http://127.0.0.1:{host}"
    assert await client.text(chat(f"{base}/plain.png")) == expected
    reasons = {
        f"{base}/page.png": "is no image in JPEG, PNG, WebP or GIF",
        f"{base}/missing": "its host answers 404",
        f"http://127.0.0.1:{host + 1}/plain.png": "does not name its host",
        "http://nowhere.invalid/plain.png": "its host has no public address",
        "http://169.254.169.254/latest/": "does not name its host",
    }
    for url, text in reasons.items():
        assert text in await refusal(client, url)
        assert await client.text(chat(f"{base}/plain.png")) == expected
