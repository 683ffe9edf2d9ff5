"""Adapters as names of models, in every API."""

import asyncio
from pathlib import Path
from typing import Any

from shared.wire.envelope import read_options
from tests.services.gateway.apis.adapters.test_adapters import HI, SQL, TEXT, serving
from tests.services.gateway.fakes import FakeTokenizer


async def test_every_api_takes_the_name(tmp_path: Path, tokenizer: FakeTokenizer):
    bodies: dict[str, Any] = {
        TEXT: {"prompt": "a"},
        "/v1/responses": {"input": "a"},
        "/v1/messages": {"messages": HI, "max_tokens": 5},
        "/invocations": {"prompt": "a"},
    }
    async with serving(tmp_path, tokenizer, SQL) as (_, http):
        for path, body in bodies.items():
            asking = asyncio.create_task(http.post(path, json=body | {"model": "sql"}))
            asked = await tokenizer.answer("Hello")
            assert read_options(asked.submit.options).adapter == SQL.digest, path
            assert (await (await asking).json())["model"] == "sql"
        body = {"model": "sql", "prompt": "a"}
        assert (await http.post("/tokenize", json=body)).status == 200
