"""Headers for pages of other origins."""

from typing import Any

import pytest

from shared.errors import ConfigError
from shared.settings.gateway import GatewayConfig
from shared.settings.load import load_settings
from tests.services.gateway.client import Answer, Client

PAGE = "https://page.example"
PREFLIGHT = {
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type",
}
KEY = {"Authorization": "Bearer k"}


def allowing(*lists: list[str]) -> pytest.MarkDecorator:
    settings = [{"api_key": ["k"], "allowed_origins": origins} for origins in lists]
    return pytest.mark.parametrize("settings", settings, ids=map(str, lists))


async def ask(client: Client, method: str, headers: dict[str, str]) -> Answer:
    return await client.send(method, "/v1/models", headers={"Origin": PAGE} | headers)


@allowing([PAGE], ["*"])
async def test_a_page_that_is_let_in_may_ask_and_read(
    client: Client, settings: dict[str, Any]
) -> None:
    [expected] = settings["allowed_origins"]
    answer = await ask(client, "OPTIONS", PREFLIGHT)
    assert answer.status == 204, "before it has a key"
    assert answer.headers["Access-Control-Allow-Origin"] == expected
    assert answer.headers["Access-Control-Allow-Headers"] == "authorization,content-type"
    assert "POST" in answer.headers["Access-Control-Allow-Methods"]
    answer = await ask(client, "GET", KEY)
    assert answer.status == 200
    assert answer.headers["Access-Control-Allow-Origin"] == expected
    assert "X-Request-Id" in answer.headers["Access-Control-Expose-Headers"]
    assert answer.headers["Vary"] == "Origin"


@allowing([PAGE])
async def test_a_refusal_can_be_read_too(client: Client) -> None:
    answer = await ask(client, "GET", {})
    assert (answer.status, answer.headers["Access-Control-Allow-Origin"]) == (401, PAGE)


@allowing([], ["https://other.example"])
async def test_other_pages_get_no_headers(client: Client) -> None:
    for method, headers in (("OPTIONS", PREFLIGHT), ("GET", KEY)):
        answer = await ask(client, method, headers)
        assert not [name for name in answer.headers if name.startswith("Access-Control")]


@pytest.mark.parametrize("origin", ["page.example", "https://page.example/path", "ftp://a", ""])
def test_malformed_origins_are_refused(origin: str) -> None:
    with pytest.raises(ConfigError, match="allowed-origins"):
        load_settings(GatewayConfig, [f"--allowed-origins={origin}"], "shoal gateway")
