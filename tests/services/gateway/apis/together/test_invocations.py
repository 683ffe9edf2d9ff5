"""SageMaker's path with the APIs of models that pool."""

import asyncio
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from shared.wire.messages import PoolingInfo, State
from tests.services.gateway.fakes import MODEL, fake_tokenizer, running_gateway, until


@pytest.mark.parametrize(
    ("task", "body"),
    [
        ("embed", {"input": "fish"}),
        ("classify", {"input": "fish"}),
        ("embed", {"text_1": "fish", "text_2": "fish"}),
        ("classify", {"query": "fish", "documents": ["fish"]}),
    ],
)
async def test_invocations_reach_the_endpoint_of_their_fields(
    tmp_path: Path, task: Any, body: dict[str, Any]
) -> None:
    pooling = PoolingInfo(task, "last", "none", 4 if task == "embed" else 1)
    model = msgspec.structs.replace(MODEL, runner="pooling", pooling=pooling)
    async with (
        fake_tokenizer(tmp_path, model=model) as tokenizer,
        running_gateway(tmp_path) as gateway,
        aiohttp.ClientSession(f"http://127.0.0.1:{gateway.port}") as http,
    ):
        await until(lambda: gateway.status().state == State.READY)
        posting = asyncio.create_task(http.post("/invocations", json=body).__aenter__())
        async with asyncio.timeout(5):
            request = await tokenizer.submitted.get()
        assert request.submit.params.pooling is not None
        request.fail(400, "seen", "seen")
        assert (await (await posting).json())["error"]["code"] == "seen"


async def test_invocations_of_a_model_that_generates_are_refused(
    http: aiohttp.ClientSession,
) -> None:
    async with http.post("/invocations", json={"input": "a"}) as response:
        assert response.status == 400
        assert "runner" in (await response.json())["error"]["message"]
