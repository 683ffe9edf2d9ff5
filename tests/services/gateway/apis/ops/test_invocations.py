"""SageMaker's path: a body goes to the endpoint that its fields are those of."""

import asyncio
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from msgspec.structs import replace

from services.gateway.apis.ops.invocations import endpoint_of
from services.gateway.apis.pooling.endpoint import (
    CLASSIFY,
    EMBEDDINGS,
    RERANK,
    SCORE,
    PoolingEndpoint,
)
from shared.wire.messages import PoolingInfo, State
from tests.services.gateway.fakes import (
    MODEL,
    FakeTokenizer,
    fake_tokenizer,
    running_gateway,
    until,
)

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


async def test_what_is_wrong_is_named(http: aiohttp.ClientSession) -> None:
    for body, words in (
        ({"messages": []}, "messages is []"),
        ({"input": "a"}, "runner"),
        ({"model": "fish"}, "none of a chat"),
        ([], "no object"),
    ):
        async with http.post(PATH, json=body) as response:
            assert response.status == 400
            assert words in (await response.json())["error"]["message"]


@pytest.mark.parametrize(
    ("task", "fields", "endpoint"),
    [
        ("embed", {"input"}, EMBEDDINGS),
        ("classify", {"input", "model"}, CLASSIFY),
        ("embed", {"text_1", "text_2"}, SCORE),
        ("classify", {"queries", "documents"}, SCORE),
        ("classify", {"query", "documents"}, RERANK),
    ],
)
async def test_a_model_that_pools_has_its_own_endpoints(
    tmp_path: Path, task: Any, fields: set[str], endpoint: PoolingEndpoint
) -> None:
    pooling = PoolingInfo(task, "last", "none", 4 if task == "embed" else 1)
    model = replace(MODEL, runner="pooling", pooling=pooling)
    assert endpoint_of(fields, model) is endpoint
    async with (
        fake_tokenizer(tmp_path, model=model) as tokenizer,
        running_gateway(tmp_path) as gateway,
        aiohttp.ClientSession(f"http://127.0.0.1:{gateway.port}") as http,
    ):
        await until(lambda: gateway.status().state == State.READY)
        body = {name: ["fish"] if name == "documents" else "fish" for name in fields}
        posting = asyncio.create_task(http.post(PATH, json=body).__aenter__())
        async with asyncio.timeout(5):
            request = await tokenizer.submitted.get()
        assert request.submit.params.pooling is not None
        request.fail(400, "seen", "seen")
        assert (await (await posting).json())["error"]["code"] == "seen"
