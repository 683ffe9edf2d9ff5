"""Fields that stay raw JSON."""

from msgspec import Raw

from shared.errors import InvalidRequest
from shared.wire.messages import MAX_FORMAT_CHARS

NULL = Raw(b"null")

MAX_FIELD_BYTES = 256 << 10
"""The limit of a field other than a prompt, as JSON: a character may take 12 bytes."""


def check_chars(text: str, param: str) -> str:
    """``text``, made from the field ``param``, if the mesh accepts it."""
    if len(text) > MAX_FORMAT_CHARS:
        raise InvalidRequest(
            f"{param} becomes {len(text)} characters; the limit is {MAX_FORMAT_CHARS}", param=param
        )
    return text


def json_text(raw: Raw, param: str) -> str:
    """The JSON as text. Raises InvalidRequest for more than ``MAX_FIELD_BYTES``."""
    num_bytes = memoryview(raw).nbytes
    if num_bytes > MAX_FIELD_BYTES:
        raise InvalidRequest(
            f"{param} has {num_bytes} bytes; the limit is {MAX_FIELD_BYTES}", param=param
        )
    return bytes(raw).decode()
