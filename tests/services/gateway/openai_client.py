"""A gateway with files and batches, and OpenAI's client of it."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI

from services.gateway.service import GatewayService
from shared.wire.messages import State
from tests.services.gateway.fakes import running_gateway, until


@asynccontextmanager
async def gateway_of(tmp_path: Path, **settings: Any) -> AsyncIterator[GatewayService]:
    defaults = {"batch_dir": tmp_path / "store", "instance": "g1"}
    async with running_gateway(tmp_path, **(defaults | settings)) as service:
        await until(lambda: service.status().state == State.READY)
        yield service


def client_of(gateway: GatewayService, key: str = "none") -> AsyncOpenAI:
    url = f"http://127.0.0.1:{gateway.port}/v1"
    return AsyncOpenAI(base_url=url, api_key=key, max_retries=0)
