"""SageMaker's path with the APIs of models that pool."""

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

from shared.wire.messages import PoolingInfo
from tests.services.gateway.client import Client, client_of, serving
from tests.services.gateway.fakes import MODEL, fake_tokenizer


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
        serving(tmp_path) as gateway,
        client_of(gateway, tokenizer) as client,
        asyncio.timeout(5),
    ):
        asked, request = await client.begun("/invocations", **body)
        assert request.submit.params.pooling is not None
        request.fail(400, "seen", "seen")
        assert (await asked).error["code"] == "seen"


async def test_invocations_of_a_model_that_generates_are_refused(client: Client) -> None:
    assert "runner" in (await client.refused(400, "/invocations", input="a"))["message"]
