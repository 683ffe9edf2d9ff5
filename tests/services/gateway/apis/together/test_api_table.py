"""docs/api.md lists all fields of a request."""

import re
from pathlib import Path

from services.gateway.apis.messages.requests.parse import NEUTRAL
from services.gateway.apis.messages.requests.schema import MessagesRequest
from services.gateway.apis.responses.requests import schema as responses
from services.gateway.apis.responses.requests.schema import ResponseRequest
from services.gateway.chat.requests import unsupported
from services.gateway.chat.requests.format_schema import StructuredOutputs
from services.gateway.chat.requests.schema import ChatRequest, CompletionRequest, StreamOptions

TABLE = Path(__file__).parents[5] / "docs" / "api.md"


def fields_of(title: str) -> set[str]:
    """The fields named in the tables below a title."""
    _, _, below = TABLE.read_text().partition(f"# {title}\n")
    rows = [line for line in below.partition("\n# ")[0].splitlines() if line.startswith("| `")]
    return {name for row in rows for name in re.findall(r"`([a-z_]+)`", row.split("|")[1])}


def test_every_field_of_a_message_has_a_row() -> None:
    fields = {*MessagesRequest.__struct_fields__, *NEUTRAL}
    assert fields_of("Anthropic's Messages") == fields


def test_every_field_of_a_response_has_a_row() -> None:
    fields = {*ResponseRequest.__struct_fields__, *responses.NEUTRAL, *unsupported.WITHOUT_EFFECT}
    kinds = {"function", "custom", "namespace"}
    assert fields_of("OpenAI's Responses") - kinds == fields


def test_every_field_has_a_row_and_every_row_a_field() -> None:
    written = fields_of("Fields of a request")
    fields = {
        *ChatRequest.__struct_fields__,
        *CompletionRequest.__struct_fields__,
        *unsupported.CHAT,
        *unsupported.COMPLETION,
        *unsupported.WITHOUT_EFFECT,
    }
    options = {*StructuredOutputs.__struct_fields__, *StreamOptions.__struct_fields__}
    kinds = {"text", "none", "auto", "required", "allowed_tools", "function", "custom"}
    assert fields - written == set()
    assert written - fields - options - kinds == set()
