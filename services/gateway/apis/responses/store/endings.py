"""The end of a stored response that was never finished."""

import msgspec
from msgspec import Raw, Struct


class Failure(Struct):
    code: str
    message: str


def ended(response: bytes, status: str, error: Failure | None = None) -> bytes:
    """The JSON of a response with another end."""
    fields = msgspec.json.decode(response, type=dict[str, Raw])
    return msgspec.json.encode(fields | {"status": status, "error": error})
