"""Requests of an API key that cost a tokenizer work and generate nothing."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

from services.gateway.http.account import Account, KeyLimits
from tests.services.gateway.fakes import FakeTokenizer, until
from tests.services.gateway.test_account import finish, posting
from tests.services.gateway.test_errors import MESSAGES

COUNTS: dict[str, dict[str, Any]] = {
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [9]},
    "/v1/messages/count_tokens": {"messages": MESSAGES, "model": "fish"},
    "/v1/responses/input_tokens": {"input": "a"},
}


@pytest.mark.parametrize("path", COUNTS)
async def test_requests_that_generate_nothing_have_the_same_limit_apart(
    tmp_path: Path, tokenizer: FakeTokenizer, path: str
) -> None:
    tokenizer.converts = False  # so that the first stays open
    settings: Any = {"max_open_requests_per_key": 1, "batch_dir": tmp_path / "batches"}
    async with posting(tmp_path, instance="g1", **settings) as post:
        first = post("ada", path, **COUNTS[path])
        await until(lambda: tokenizer.converted)
        for other in (*COUNTS, "/v1/files", "/v1/batches"):
            async with await post("ada", other, **COUNTS.get(other, {})) as response:
                assert response.status == 429, other
                assert "max-open-requests-per-key" in await response.text()
        await finish(post("ada"), await tokenizer.accepted())
        async with await post("ada", "/abort_requests", request_ids=["a"]) as response:
            assert response.status == 200
        first.cancel()
        await asyncio.wait([first])


@pytest.mark.parametrize("path", COUNTS)
async def test_a_tokenizer_learns_the_owner_of_a_text(
    tmp_path: Path, tokenizer: FakeTokenizer, path: str
) -> None:
    async with posting(tmp_path) as post, await post("ada", path, **COUNTS[path]) as response:
        assert response.status == 200
        (convert,) = tokenizer.converted
        assert convert.owner == Account(SecretStr("ada"), KeyLimits(None, None)).key_id


async def test_tokens_that_are_used_up_are_no_limit_of_such_work(
    tmp_path: Path, tokenizer: FakeTokenizer
) -> None:
    async with posting(tmp_path, max_tokens_per_minute_per_key=1) as post:
        await finish(post("ada"), await tokenizer.accepted())
        async with await post("ada") as response:
            assert response.status == 429
        async with await post("ada", "/tokenize") as response:
            assert response.status == 200
