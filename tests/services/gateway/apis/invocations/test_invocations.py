"""SageMaker's path: a body's fields select the endpoint."""

from typing import Any

import pytest
from msgspec.structs import replace

from services.gateway.apis.invocations.endpoint import path_of
from shared.wire.messages import PoolingInfo
from tests.services.gateway.client import HI, Client
from tests.services.gateway.fakes import MODEL

PATH = "/invocations"


@pytest.mark.parametrize(
    ("fields", "kind"),
    [({"messages": HI, "prompt": None}, "chat.completion"), ({"prompt": "a"}, "text_completion")],
)
@pytest.mark.parametrize("is_stream", [False, True])
async def test_chats_and_completions_are_answered_as_on_their_own_paths(
    client: Client, fields: dict[str, Any], kind: str, is_stream: bool
) -> None:
    answer, _ = await client.answered(PATH, "x", "y", **fields, stream=is_stream)
    assert f'"object":"{kind}' in answer.text
    assert ("data: [DONE]" in answer.text) == is_stream


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"messages": []}, "messages is []"),
        ({"model": "fish"}, "none of a chat"),
        ([], "no object"),
    ],
)
async def test_malformed_bodies_are_named(client: Client, body: Any, words: str) -> None:
    answer = await client.send("POST", PATH, json=body)
    assert answer.status == 400
    assert words in answer.error["message"]


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
