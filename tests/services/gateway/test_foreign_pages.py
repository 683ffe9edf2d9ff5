"""A server without keys refuses pages of other sites, under every host name."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from pydantic import ValidationError

from services.gateway.service import GatewayService
from shared.settings.gateway import GatewayConfig
from shared.wire.messages import State
from tests.services.gateway.fakes import FakeTokenizer, running_gateway, until
from tests.services.gateway.test_errors import error_of

EVIL = "http://evil.example"
POSTS = ("/v1/completions", "/abort_requests", "/v1/files", "/v1/batches", "/tokenize")


async def status(
    gateway: GatewayService, method: str = "GET", path: str = "/v1/models", **headers: str
) -> int:
    """An answer's status, with an error object unless it is a success."""
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    async with (
        aiohttp.ClientSession(f"http://127.0.0.1:{gateway.port}") as http,
        http.request(method, path, headers=names) as response,
    ):
        if response.status >= 400:
            await error_of(response)
        return response.status


class TestOrigins:
    async def test_a_page_of_another_site_is_refused_before_anything_is_read(
        self, gateway: GatewayService, tokenizer: FakeTokenizer
    ) -> None:
        for path in POSTS:
            for origin in (EVIL, "null", f"{EVIL}:{gateway.port}", "http://\udcff"):
                assert await status(gateway, "POST", path, Origin=origin) == 403
        assert await status(gateway, Origin=EVIL, Sec_Fetch_Site="cross-site") == 403
        assert tokenizer.submitted.empty()

    async def test_a_page_of_our_own_is_served(self, gateway: GatewayService) -> None:
        own = f"127.0.0.1:{gateway.port}"
        assert await status(gateway, Origin=f"http://{own}") == 200
        assert await status(gateway, Origin="http://localhost:1", Host="localhost:1") == 200
        assert await status(gateway, Origin="http://[::1]:1", Host="[::1]:1") == 200

    async def test_a_page_is_served_behind_a_proxy_that_changes_scheme_or_name(
        self, gateway: GatewayService
    ) -> None:
        same = {"Sec_Fetch_Site": "same-origin"}
        assert await status(gateway, Origin="https://localhost", Host="localhost") == 200
        assert await status(gateway, Origin="https://shoal.example", **same) == 200

    async def test_allowed_origins_are_served(
        self, tmp_path: Path, tokenizer: FakeTokenizer
    ) -> None:
        for allowed in (EVIL, "*"):
            async with serving(tmp_path, allowed_origins=[allowed]) as gateway:
                assert await status(gateway, Origin=EVIL) == 200

    async def test_with_a_key_the_origin_does_not_matter(
        self, tmp_path: Path, tokenizer: FakeTokenizer
    ) -> None:
        async with serving(tmp_path, api_key=["k"]) as gateway:
            assert await status(gateway, Origin=EVIL, Authorization="Bearer k") == 200

    async def test_a_page_has_to_say_that_it_sends_json(self, gateway: GatewayService) -> None:
        own = f"http://127.0.0.1:{gateway.port}"
        url = f"{own}/v1/completions"
        async with (
            aiohttp.ClientSession(skip_auto_headers=["Content-Type"]) as http,
            http.post(url, data=b"{}", headers={"Origin": own}) as response,
        ):
            assert response.status == 415


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
        self, gateway: GatewayService, host: str, expected: int
    ) -> None:
        assert await status(gateway, Host=host) == expected

    async def test_a_client_without_a_name_is_answered(self, gateway: GatewayService) -> None:
        """Load balancers' checks in HTTP/1.0, for example."""
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
        writer.write(b"GET /ready HTTP/1.0\r\n\r\n")
        assert (await reader.read()).startswith(b"HTTP/1.0 200")
        writer.close()

    @pytest.mark.parametrize(
        ("settings", "host", "expected"),
        [
            ({"allowed_hosts": ["models.example"]}, "Models.Example:8000", 200),
            ({"allowed_hosts": ["models.example"]}, "localhost", 200),
            ({"allowed_hosts": ["models.example"]}, "evil.example", 421),
            ({"allowed_hosts": ["*"]}, "evil.example", 200),
            ({"api_key": ["k"]}, "evil.example", 200),
            ({"host": "0.0.0.0"}, "models.example", 200),
            ({"host": "0.0.0.0", "allowed_hosts": ["models.example"]}, "evil.example", 421),
            ({"host": "localhost"}, "evil.example", 421),
        ],
    )
    async def test_settings_say_which_names_are_answered(
        self,
        tmp_path: Path,
        tokenizer: FakeTokenizer,
        settings: dict[str, Any],
        host: str,
        expected: int,
    ) -> None:
        async with serving(tmp_path, **settings) as gateway:
            assert await status(gateway, Host=host, Authorization="Bearer k") == expected

    @pytest.mark.parametrize("name", ["http://a.example", "a.example:80", "", "a b"])
    def test_malformed_names_are_refused(self, name: str) -> None:
        with pytest.raises(ValidationError, match="without a port"):
            GatewayConfig(allowed_hosts=[name])

    async def test_requests_of_the_gateway_itself_are_answered(
        self, tmp_path: Path, tokenizer: FakeTokenizer
    ) -> None:
        async with serving(tmp_path, batch_dir=tmp_path / "batches", instance="g1") as gateway:
            connector = aiohttp.UnixConnector(str(gateway._internal_socket))
            async with (
                aiohttp.ClientSession("http://gateway", connector=connector) as http,
                http.get("/v1/models") as response,
            ):
                assert response.status == 200


@asynccontextmanager
async def serving(tmp_path: Path, **settings: Any) -> AsyncIterator[GatewayService]:
    async with running_gateway(tmp_path, **settings) as gateway:
        await until(lambda: gateway.status().state == State.READY)
        yield gateway
