"""Sharing of cached prefixes between requests."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI
from pydantic import SecretStr

from services.gateway.http.account import Account, KeyLimits
from shared.wire.envelope import read_options
from tests.services.gateway.apis.batches.test_batches import batch_file, body, start
from tests.services.gateway.apis.pooling.test_pooling import mesh
from tests.services.gateway.asking import completion
from tests.services.gateway.fakes import FakeTokenizer
from tests.services.gateway.openai_client import client_of, gateway_of

KEYS: Any = ["key-of-ann", "key-of-bob"]
IDS = [Account(key, KeyLimits(None, None)).key_id for key in map(SecretStr, KEYS)]


async def ask(client: AsyncOpenAI, way: str) -> None:
    more = {"cache_salt": "s"}
    match way:
        case "completion":
            await client.completions.create(**body(), extra_body=more)
        case "response":
            await client.responses.create(model="fish", input="Hi", extra_body=more)
        case "background":
            await client.responses.create(
                model="fish", input="Hi", background=True, extra_body=more
            )
        case "batch":
            await start(client, batch_file(1, body=body() | more))


@pytest.mark.parametrize("way", ["completion", "response", "background", "batch"])
async def test_each_way_of_asking_has_the_salt_of_its_key(
    tmp_path: Path, tokenizer: FakeTokenizer, way: str
):
    settings = {"api_key": KEYS, "response_store": tmp_path / "store.db"}
    async with gateway_of(tmp_path, **settings) as gateway:
        for key, key_id in zip(KEYS, IDS, strict=True):
            async with client_of(gateway, key) as client:
                asking = asyncio.create_task(ask(client, way))
                submitted = await tokenizer.answer("x")
                await asking
            assert read_options(submitted.submit.options).salt == f"{key_id} s"


async def test_a_request_for_vectors_has_the_salt_of_its_key(tmp_path: Path):
    async with mesh(tmp_path, api_key=KEYS) as client:
        asked, submitted = await client.begun("/v1/embeddings", key=KEYS[0], input="a")
        submitted.fail(400, "some_code", "no vector")
        await asked
        assert read_options(submitted.submit.options).salt == f"{IDS[0]} "


@pytest.mark.parametrize(
    ("owner", "shares_cache", "salt"), [("", False, "s"), ("k", True, "s"), ("k", False, "k s")]
)
def test_a_salt_is_changed_for_keys_that_do_not_share(owner: str, shares_cache: bool, salt: str):
    job = completion(cache_salt="s").of_owner(owner, shares_cache=shares_cache)
    assert (job.options.owner, job.options.salt) == (owner, salt)
