from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
from openai import AsyncOpenAI

from services.gateway.service import GatewayService
from shared.wire.messages import State
from tests.services.gateway.fakes import FakeTokenizer, fake_tokenizer, running_gateway, until


@pytest.fixture
async def tokenizer(tmp_path: Path) -> AsyncIterator[FakeTokenizer]:
    async with fake_tokenizer(tmp_path) as fake:
        yield fake


@pytest.fixture
async def gateway(tmp_path: Path, tokenizer: FakeTokenizer) -> AsyncIterator[GatewayService]:
    """Connected to ``tokenizer`` and ready."""
    async with running_gateway(tmp_path) as service:
        await until(lambda: service.status().state == State.READY)
        yield service


@pytest.fixture
async def openai(gateway: GatewayService) -> AsyncIterator[AsyncOpenAI]:
    url = f"http://127.0.0.1:{gateway.port}/v1"
    async with AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
async def http(gateway: GatewayService) -> AsyncIterator[aiohttp.ClientSession]:
    url, headers = f"http://127.0.0.1:{gateway.port}", {"Content-Type": "application/json"}
    async with aiohttp.ClientSession(url, headers=headers) as session:
        yield session
