"""Parts of a schema beyond grammars are named to the client in its own terms."""

import asyncio
import json
from typing import Any

import aiohttp
import numpy as np
import pytest

from services.gateway.http.violations import not_held
from shared.wire.messages import Accepted
from tests.services.gateway.fakes import FakeTokenizer

SCHEMA = {"type": "object", "properties": {"m": {"pattern": "(?!x)"}}}
NAMED = {"name": "s", "schema": SCHEMA}
HELLO = [{"role": "user", "content": "hi"}]
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
BODIES: list[tuple[str, dict[str, Any], str]] = [
    # path, body, field of the client
    (CHAT, {"messages": HELLO, "guided_json": SCHEMA}, "guided_json"),
    (
        TEXT,
        {"prompt": "a", "structured_outputs": {"json": SCHEMA}},
        "structured_outputs.json",
    ),
    (
        CHAT,
        {"messages": HELLO, "response_format": {"type": "json_schema", "json_schema": NAMED}},
        "response_format.json_schema.schema",
    ),
    (
        "/v1/responses",
        {"input": "hi", "text": {"format": {"type": "json_schema", **NAMED}}},
        "text.format.schema",
    ),
    (
        "/v1/messages",
        {
            "messages": HELLO,
            "max_tokens": 5,
            "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}},
        },
        "output_config.format.schema",
    ),
]


@pytest.mark.parametrize(("path", "body", "named"), BODIES)
async def test_dropped_keywords_are_named(
    http: aiohttp.ClientSession,
    tokenizer: FakeTokenizer,
    path: str,
    body: dict[str, Any],
    named: str,
) -> None:
    asking = asyncio.create_task(http.post(path, json={"model": "fish", **body}))
    request = await tokenizer.submitted.get()
    assert request.submit.format is not None
    assert not request.submit.format.is_strict
    assert json.loads(request.submit.format.value) == SCHEMA
    left_out = [f"{request.submit.format.param}.properties.m.pattern"]
    request.peer.send(Accepted(*request.key, left_out=left_out), np.array([5], np.int32))
    request.text("{}")
    request.finish()
    async with await asking as response:
        assert response.status == 200, await response.text()
        warnings = response.headers["X-Shoal-Warnings"]
        assert warnings == f"{named}.properties.m.pattern: not enforced"


def test_a_header_holds_no_name_that_breaks_it():
    [warning] = not_held(["f.properties.a\r\nX: ü, b"], {"f": "text.format"})
    assert warning == "text.format.properties.a__X_____b: not enforced"
