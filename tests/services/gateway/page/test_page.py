"""The files of the page at ``/``: access and headers. tests/page runs the page in a browser."""

import gzip
import re

import aiohttp
import pytest

from services.gateway.page.endpoint import FOLDER, TYPES
from tests.services.gateway.client import Client

MAX_BYTES = 200_000
FILES = sorted(path for path in FOLDER.rglob("*") if path.suffix in TYPES)
REFERENCE = re.compile(r'(?:(?:href|src)=|from |url\()"([^"#]+)"')


async def test_all_files_are_served_with_their_types(http: aiohttp.ClientSession) -> None:
    for path in FILES:
        name = path.relative_to(FOLDER).as_posix()
        async with http.get("/" if name == "index.html" else f"/page/{name}") as response:
            assert response.status == 200, name
            assert response.headers["Content-Type"] == TYPES[path.suffix]
            assert response.headers["X-Content-Type-Options"] == "nosniff"
            assert await response.read() == path.read_bytes()


async def test_nothing_inline_and_nothing_from_elsewhere_is_allowed(client: Client) -> None:
    policy = (await client.get("/")).headers["Content-Security-Policy"]
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules["default-src"] == "'none'"
    assert {rules[f"{name}-src"] for name in ("script", "style", "connect")} == {"'self'"}
    assert rules["frame-ancestors"] == rules["base-uri"] == "'none'"
    assert rules["require-trusted-types-for"] == "'script'"


async def test_a_browser_that_has_a_file_gets_none(client: Client) -> None:
    tag = (await client.get("/page/app.js")).headers["ETag"]
    for given, status in ((tag, 304), (f'"other", {tag}', 304), ('"other"', 200)):
        answer = await client.get("/page/app.js", If_None_Match=given)
        assert (answer.status, answer.headers["ETag"]) == (status, tag)


@pytest.mark.parametrize("name", ["nothing.js", "../service.py", "%2e%2e/service.py", "vendor"])
async def test_other_files_are_not_there(client: Client, name: str) -> None:
    assert (await client.get(f"/page/{name}")).status == 404


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"api_key": ["k"], "page": True}, [200, 200, 401]),
        ({"api_key": ["k"], "page": False}, [401, 401, 401]),
    ],
    ids=["on", "off"],
)
async def test_the_page_needs_no_key_and_can_be_turned_off(
    client: Client, expected: list[int]
) -> None:
    paths = ("/", "/page/app.js", "/v1/models")
    assert [(await client.get(path)).status for path in paths] == expected


def test_the_page_is_small() -> None:
    assert sum(len(gzip.compress(path.read_bytes())) for path in FILES) < MAX_BYTES


def test_references_of_files_exist() -> None:
    missing = []
    for path in FILES:
        if path.suffix in (".html", ".css", ".js") and "vendor" not in path.parts:
            base = FOLDER.parent if path.name == "index.html" else path.parent
            found = REFERENCE.findall(path.read_text())
            missing += [(path, each) for each in found if not (base / each).resolve().is_file()]
    assert not missing
