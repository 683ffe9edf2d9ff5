"""Headers for pages of other origins."""

from pathlib import Path

import aiohttp
import pytest

from shared.errors import ConfigError
from shared.settings.gateway import GatewayConfig
from shared.settings.load import load_settings
from shared.wire.messages import State
from tests.services.gateway.fakes import FakeTokenizer, running_gateway, until

PAGE = "https://page.example"
PREFLIGHT = {
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type",
}


async def ask(
    tmp_path: Path, method: str, headers: dict[str, str], **settings: object
) -> aiohttp.ClientResponse:
    """The answer of ``/v1/models``."""
    async with running_gateway(tmp_path, api_key=["k"], **settings) as gateway:
        await until(lambda: gateway.status().state == State.READY)
        url = f"http://127.0.0.1:{gateway.port}/v1/models"
        async with (
            aiohttp.ClientSession() as session,
            session.request(method, url, headers=headers) as response,
        ):
            return response


@pytest.mark.parametrize(("allowed", "expected"), [(PAGE, PAGE), ("*", "*")])
async def test_a_page_that_is_let_in_may_ask_and_read(
    tmp_path: Path, tokenizer: FakeTokenizer, allowed: str, expected: str
) -> None:
    settings = {"allowed_origins": [allowed]}
    response = await ask(tmp_path, "OPTIONS", {"Origin": PAGE} | PREFLIGHT, **settings)
    assert response.status == 204, "before it has a key"
    assert response.headers["Access-Control-Allow-Origin"] == expected
    assert response.headers["Access-Control-Allow-Headers"] == "authorization,content-type"
    assert "POST" in response.headers["Access-Control-Allow-Methods"]
    headers = {"Origin": PAGE, "Authorization": "Bearer k"}
    response = await ask(tmp_path, "GET", headers, **settings)
    assert response.status == 200
    assert response.headers["Access-Control-Allow-Origin"] == expected
    assert "X-Request-Id" in response.headers["Access-Control-Expose-Headers"]
    assert response.headers["Vary"] == "Origin"


async def test_a_refusal_can_be_read_too(tmp_path: Path, tokenizer: FakeTokenizer) -> None:
    response = await ask(tmp_path, "GET", {"Origin": PAGE}, allowed_origins=[PAGE])
    assert response.status == 401
    assert response.headers["Access-Control-Allow-Origin"] == PAGE


@pytest.mark.parametrize("allowed", [[], ["https://other.example"]])
async def test_other_pages_get_no_headers(
    tmp_path: Path, tokenizer: FakeTokenizer, allowed: list[str]
) -> None:
    for method, headers in (("OPTIONS", PREFLIGHT), ("GET", {"Authorization": "Bearer k"})):
        response = await ask(tmp_path, method, {"Origin": PAGE} | headers, allowed_origins=allowed)
        assert not [name for name in response.headers if name.startswith("Access-Control")]


@pytest.mark.parametrize("origin", ["page.example", "https://page.example/path", "ftp://a", ""])
def test_malformed_origins_are_refused(origin: str) -> None:
    with pytest.raises(ConfigError, match="allowed-origins"):
        load_settings(GatewayConfig, [f"--allowed-origins={origin}"], "shoal gateway")
