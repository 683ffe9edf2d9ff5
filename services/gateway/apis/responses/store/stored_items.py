"""The items of stored responses. Pure."""

import msgspec
from msgspec import Raw

from services.gateway.apis.responses.store.database import Entry


class _Outputs(msgspec.Struct):
    output: list[Raw]


class _Id(msgspec.Struct):
    id: str


def items_of(entry: Entry) -> list[bytes]:
    """The JSON of each item, of the input and then of the output."""
    of_input = msgspec.json.decode(entry.input, type=list[Raw])
    of_output = msgspec.json.decode(entry.response, type=_Outputs).output
    return [bytes(item) for item in (*of_input, *of_output)]


def output_items(response: bytes) -> dict[str, bytes]:
    """The JSON of each item of a response's output by its id."""
    items = msgspec.json.decode(response, type=_Outputs).output
    return {msgspec.json.decode(item, type=_Id).id: bytes(item) for item in items}
