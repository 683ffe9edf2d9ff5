"""Adapters as names of models, in every API."""

from pathlib import Path
from typing import Any

import pytest

from tests.services.gateway.apis.adapters.test_adapters import HI, SQL, TEXT, digest_of, knowing
from tests.services.gateway.fakes import FakeTokenizer


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (TEXT, {"prompt": "a"}),
        ("/v1/responses", {"input": "a"}),
        ("/v1/messages", {"messages": HI, "max_tokens": 5}),
        ("/invocations", {"prompt": "a"}),
    ],
)
async def test_every_api_takes_the_name(
    tmp_path: Path, tokenizer: FakeTokenizer, path: str, body: Any
):
    async with knowing(tmp_path, tokenizer, SQL) as client:
        answer, asked = await client.answered(path, "Hello", **body, model="sql")
        assert digest_of(asked) == SQL.digest
        assert answer.json["model"] == "sql"
        assert (await client.post("/tokenize", model="sql", prompt="a")).status == 200
