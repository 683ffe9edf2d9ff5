from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from openai import AsyncOpenAI

from services.gateway.service import GatewayService
from shared.wire.messages import ModelInfo
from tests.services.gateway import openai_client
from tests.services.gateway.client import Client, client_of, serving
from tests.services.gateway.fakes import MODEL, FakeTokenizer, fake_tokenizer
from tests.services.gateway.marked import FIRST_MARKER, MARKERS


@pytest.fixture
def model() -> ModelInfo:
    """Of ``tokenizer``; see ``with_model``."""
    return MODEL


@pytest.fixture
async def tokenizer(tmp_path: Path, model: ModelInfo) -> AsyncIterator[FakeTokenizer]:
    async with fake_tokenizer(tmp_path, model=model) as fake:
        if model.tool_parser:
            fake.vocabulary[FIRST_MARKER:] = [marker.encode() for marker in MARKERS]
        yield fake


@pytest.fixture
def settings() -> dict[str, Any]:
    """Of ``gateway``; see ``with_settings``."""
    return {}


@pytest.fixture
async def gateway(
    tmp_path: Path, tokenizer: FakeTokenizer, settings: dict[str, Any]
) -> AsyncIterator[GatewayService]:
    """Connected to ``tokenizer`` and ready."""
    paths = {name: tmp_path / each for name, each in settings.items() if isinstance(each, Path)}
    async with serving(tmp_path, **settings | paths) as service:
        yield service


@pytest.fixture
async def openai(gateway: GatewayService) -> AsyncIterator[AsyncOpenAI]:
    async with openai_client.client_of(gateway) as client:
        yield client


@pytest.fixture
async def client(gateway: GatewayService, tokenizer: FakeTokenizer) -> AsyncIterator[Client]:
    async with client_of(gateway, tokenizer) as client:
        yield client


@pytest.fixture
def http(client: Client) -> aiohttp.ClientSession:
    return client.http
