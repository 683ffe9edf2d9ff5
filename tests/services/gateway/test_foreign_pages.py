"""A server without keys refuses pages of other sites, under every host name."""

from pathlib import Path

import aiohttp
import pytest
from pydantic import ValidationError

from services.gateway.service import GatewayService
from shared.settings.gateway import GatewayConfig
from tests.services.gateway.client import Client, raw_answer, with_settings

EVIL = "http://evil.example"
POSTS = ("/v1/completions", "/abort_requests", "/v1/files", "/v1/batches", "/tokenize")


async def status(
    client: Client, method: str = "GET", path: str = "/v1/models", **headers: str
) -> int:
    """An answer's status, with an error object unless it is a success."""
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    answer = await client.send(method, path, headers=names)
    assert answer.status < 400 or answer.error
    return answer.status


class TestOrigins:
    async def test_a_page_of_another_site_is_refused_before_anything_is_read(
        self, client: Client
    ) -> None:
        for path in POSTS:
            for origin in (EVIL, "null", f"{EVIL}:{client.gateway.port}", "http://\udcff"):
                assert await status(client, "POST", path, Origin=origin) == 403
        assert await status(client, Origin=EVIL, Sec_Fetch_Site="cross-site") == 403
        assert client.tokenizer.submitted.empty()

    async def test_a_page_of_our_own_is_served_also_behind_a_proxy(self, client: Client) -> None:
        """The proxy changes the scheme or the name."""
        assert await status(client, Origin=f"http://127.0.0.1:{client.gateway.port}") == 200
        for origin, host in (
            ("http://localhost:1", "localhost:1"),
            ("http://[::1]:1", "[::1]:1"),
            ("https://localhost", "localhost"),
        ):
            assert await status(client, Origin=origin, Host=host) == 200
        assert await status(client, Origin="https://a.example", Sec_Fetch_Site="same-origin") == 200

    @pytest.mark.parametrize(
        "settings",
        [{"allowed_origins": [EVIL]}, {"allowed_origins": ["*"]}, {"api_key": ["k"]}],
        ids=str,
    )
    async def test_a_page_with_an_allowed_origin_or_a_key_is_served(self, client: Client) -> None:
        assert await status(client, Origin=EVIL, Authorization="Bearer k") == 200

    async def test_a_page_has_to_say_that_it_sends_json(self, gateway: GatewayService) -> None:
        own = f"http://127.0.0.1:{gateway.port}"
        async with (
            aiohttp.ClientSession(skip_auto_headers=["Content-Type"]) as http,
            http.post(f"{own}/v1/completions", data=b"{}", headers={"Origin": own}) as response,
        ):
            assert response.status == 415


NAMED = {"allowed_hosts": ["models.example"]}


class TestHosts:
    @pytest.mark.parametrize(
        ("host", "expected"),
        [
            ("localhost", 200),
            ("LOCALHOST:8000", 200),
            ("127.0.0.1", 200),
            ("192.168.1.2:80", 200),
            ("[::1]:8000", 200),
            ("[::1]", 200),
            ("evil.example", 421),
            ("evil.example:8000", 421),
            ("localhost.evil.example", 421),
            ("127.0.0.1.evil.example", 421),
            ("[localhost", 421),
            ("localhost:80:80", 421),
            ("evil.example@localhost", 421),
        ],
    )
    async def test_on_the_loopback_only_names_of_this_machine_are_answered(
        self, client: Client, host: str, expected: int
    ) -> None:
        assert await status(client, Host=host) == expected

    async def test_a_client_without_a_name_is_answered(self, gateway: GatewayService) -> None:
        """Load balancers' checks in HTTP/1.0, for example."""
        answer = await raw_answer(gateway, b"GET /ready HTTP/1.0\r\n\r\n")
        assert answer.startswith(b"HTTP/1.0 200")

    @pytest.mark.parametrize(
        ("settings", "host", "expected"),
        [
            (NAMED, "Models.Example:8000", 200),
            (NAMED, "localhost", 200),
            (NAMED, "evil.example", 421),
            ({"allowed_hosts": ["*"]}, "evil.example", 200),
            ({"api_key": ["k"]}, "evil.example", 200),
            ({"host": "0.0.0.0"}, "models.example", 200),
            ({"host": "0.0.0.0"} | NAMED, "evil.example", 421),
            ({"host": "localhost"}, "evil.example", 421),
        ],
    )
    async def test_settings_say_which_names_are_answered(
        self, client: Client, host: str, expected: int
    ) -> None:
        assert await status(client, Host=host, Authorization="Bearer k") == expected

    @pytest.mark.parametrize("name", ["http://a.example", "a.example:80", "", "a b"])
    def test_malformed_names_are_refused(self, name: str) -> None:
        with pytest.raises(ValidationError, match="without a port"):
            GatewayConfig(allowed_hosts=[name])

    @with_settings(batch_dir=Path("batches"), instance="g1")
    async def test_requests_of_the_gateway_itself_are_answered(
        self, gateway: GatewayService
    ) -> None:
        connector = aiohttp.UnixConnector(str(gateway._internal_socket))
        async with (
            aiohttp.ClientSession("http://gateway", connector=connector) as http,
            http.get("/v1/models") as response,
        ):
            assert response.status == 200
