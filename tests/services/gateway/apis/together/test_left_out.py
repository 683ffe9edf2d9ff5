"""Parts of a schema beyond grammars are named to the client in its own terms."""

import json
from typing import Any

import numpy as np
import pytest

from services.gateway.http.violations import not_held
from shared.wire.messages import Accepted
from tests.services.gateway.client import CHAT, HI, TEXT, Client

SCHEMA = {"type": "object", "properties": {"m": {"pattern": "(?!x)"}}}
NAMED = {"name": "s", "schema": SCHEMA}
OF_OPENAI = {"type": "json_schema", "json_schema": NAMED}
OF_ANTHROPIC = {"format": {"type": "json_schema", "schema": SCHEMA}}


@pytest.mark.parametrize(
    ("path", "body", "named"),
    [
        (CHAT, {"messages": HI, "guided_json": SCHEMA}, "guided_json"),
        (TEXT, {"prompt": "a", "structured_outputs": {"json": SCHEMA}}, "structured_outputs.json"),
        (CHAT, {"messages": HI, "response_format": OF_OPENAI},
         "response_format.json_schema.schema"),
        ("/v1/responses", {"input": "hi", "text": {"format": {"type": "json_schema", **NAMED}}},
         "text.format.schema"),
        ("/v1/messages", {"messages": HI, "max_tokens": 5, "output_config": OF_ANTHROPIC},
         "output_config.format.schema"),
    ],
)  # fmt: skip
async def test_dropped_keywords_are_named(
    client: Client, path: str, body: dict[str, Any], named: str
) -> None:
    asked, request = await client.begun(path, model="fish", **body)
    assert not request.submit.format.is_strict
    assert json.loads(request.submit.format.value) == SCHEMA
    left_out = [f"{request.submit.format.param}.properties.m.pattern"]
    request.peer.send(Accepted(*request.key, left_out=left_out), np.array([5], np.int32))
    request.text("{}")
    answer = await client.finish(asked, request)
    assert answer.headers["X-Shoal-Warnings"] == f"{named}.properties.m.pattern: not enforced"


def test_a_header_holds_no_name_that_breaks_it():
    [warning] = not_held(["f.properties.a\r\nX: ü, b"], {"f": "text.format"})
    assert warning == "text.format.properties.a__X_____b: not enforced"
