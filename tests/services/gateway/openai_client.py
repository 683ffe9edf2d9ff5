"""A gateway with files and batches, and OpenAI's clients of it."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI, DefaultAsyncHttpxClient

from services.gateway.service import GatewayService
from tests.services.gateway.client import serving


@asynccontextmanager
async def gateway_of(tmp_path: Path, **settings: Any) -> AsyncIterator[GatewayService]:
    defaults = {"batch_dir": tmp_path / "store", "instance": "g1"}
    async with serving(tmp_path, **(defaults | settings)) as service:
        yield service


def client_at(url: str, key: str = "none") -> AsyncOpenAI:
    """Without the certificates of TLS, whose loading takes longer than most tests."""
    http = DefaultAsyncHttpxClient(verify=False)
    return AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, http_client=http)


def client_of(gateway: GatewayService, key: str = "none") -> AsyncOpenAI:
    return client_at(f"http://127.0.0.1:{gateway.port}", key)


@asynccontextmanager
async def clients(tmp_path: Path, *keys: str, **settings: Any) -> AsyncIterator[Any]:
    """The client of a gateway, or one for each of its ``keys``."""
    settings |= {"api_key": [*keys]} if keys else {}
    async with gateway_of(tmp_path, **settings) as gateway, AsyncExitStack() as stack:
        found = [client_of(gateway, key) for key in keys or ("none",)]
        for client in found:
            await stack.enter_async_context(client)
        yield found if keys else found[0]
