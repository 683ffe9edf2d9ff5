"""Requests of an API key that cost a tokenizer work and generate nothing."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

from services.gateway.http.account import Account, KeyLimits
from tests.services.gateway.client import HI, TEXT, Client, with_settings
from tests.services.gateway.fakes import until

COUNTS: dict[str, dict[str, Any]] = {
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [9]},
    "/v1/messages/count_tokens": {"messages": HI, "model": "fish"},
    "/v1/responses/input_tokens": {"input": "a"},
}
KEYS = ["ada", "bob"]


@with_settings(api_key=KEYS, max_open_requests_per_key=1, batch_dir=Path("batches"), instance="g1")
@pytest.mark.parametrize("path", COUNTS)
async def test_requests_that_generate_nothing_have_the_same_limit_apart(
    client: Client, path: str
) -> None:
    client.tokenizer.converts = False  # so that the first stays open
    first = asyncio.create_task(client.post(path, key="ada", **COUNTS[path]))
    await until(lambda: client.tokenizer.converted)
    for other in (*COUNTS, "/v1/files", "/v1/batches"):
        answer = await client.post(other, key="ada", **COUNTS.get(other, {"prompt": "a"}))
        assert answer.status == 429, other
        assert "max-open-requests-per-key" in answer.text
    await client.finish(*await client.accepted(TEXT, key="ada", prompt="a"))
    assert (await client.post("/abort_requests", key="ada", request_ids=["a"])).status == 200
    first.cancel()
    await asyncio.wait([first])


@with_settings(api_key=KEYS)
@pytest.mark.parametrize("path", COUNTS)
async def test_a_tokenizer_learns_the_owner_of_a_text(client: Client, path: str) -> None:
    assert (await client.post(path, key="ada", **COUNTS[path])).status == 200
    (convert,) = client.tokenizer.converted
    assert convert.owner == Account(SecretStr("ada"), KeyLimits(None, None)).key_id


@with_settings(api_key=KEYS, max_tokens_per_minute_per_key=1)
async def test_tokens_that_are_used_up_are_no_limit_of_such_work(client: Client) -> None:
    await client.finish(*await client.accepted(TEXT, key="ada", prompt="a"))
    assert (await client.post(TEXT, key="ada", prompt="a")).status == 429
    assert (await client.post("/tokenize", key="ada", prompt="a")).status == 200
