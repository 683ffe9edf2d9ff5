"""SageMaker's path: a body's fields select the endpoint."""

import asyncio
from typing import Any

import aiohttp
import pytest
from msgspec.structs import replace

from services.gateway.apis.invocations.endpoint import path_of
from shared.wire.messages import PoolingInfo
from tests.services.gateway.fakes import MODEL, FakeTokenizer

PATH = "/invocations"
MESSAGES = [{"role": "user", "content": "Hi"}]


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({"messages": MESSAGES, "prompt": None}, "chat.completion"),
        ({"prompt": "a"}, "text_completion"),
    ],
)
@pytest.mark.parametrize("is_stream", [False, True])
async def test_chats_and_completions_are_answered_as_on_their_own_paths(
    http: aiohttp.ClientSession,
    tokenizer: FakeTokenizer,
    fields: dict[str, Any],
    kind: str,
    is_stream: bool,
) -> None:
    body = fields | {"stream": is_stream}
    response, _ = await asyncio.gather(http.post(PATH, json=body), tokenizer.answer("x", "y"))
    async with response:
        text = await response.text()
    assert response.status == 200
    assert f'"object":"{kind}' in text
    assert ("data: [DONE]" in text) == is_stream


async def test_malformed_bodies_are_named(http: aiohttp.ClientSession) -> None:
    for body, words in (
        ({"messages": []}, "messages is []"),
        ({"model": "fish"}, "none of a chat"),
        ([], "no object"),
    ):
        async with http.post(PATH, json=body) as response:
            assert response.status == 400
            assert words in (await response.json())["error"]["message"]


@pytest.mark.parametrize(
    ("task", "fields", "path"),
    [
        ("embed", {"input"}, "/v1/embeddings"),
        ("classify", {"input", "model"}, "/classify"),
        ("embed", {"text_1", "text_2"}, "/score"),
        ("classify", {"queries", "documents"}, "/score"),
        ("classify", {"query", "documents"}, "/rerank"),
    ],
)
def test_a_model_that_pools_has_its_own_endpoints(task: Any, fields: set[str], path: str) -> None:
    pooling = PoolingInfo(task, "last", "none", 4 if task == "embed" else 1)
    assert path_of(fields, replace(MODEL, runner="pooling", pooling=pooling)) == path
