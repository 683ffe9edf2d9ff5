"""Fields that stay the JSON they came as."""

from msgspec import Raw

from shared.errors import InvalidRequest

NULL = Raw(b"null")

MAX_FIELD_BYTES = 256 << 10
"""Of what is no prompt, as JSON: a character may take 12 bytes of it."""


def json_text(raw: Raw, param: str) -> str:
    """The JSON as text. Raises InvalidRequest for more than ``MAX_FIELD_BYTES``."""
    num_bytes = memoryview(raw).nbytes
    if num_bytes > MAX_FIELD_BYTES:
        raise InvalidRequest(
            f"{param} has {num_bytes} bytes; the limit is {MAX_FIELD_BYTES}", param=param
        )
    return bytes(raw).decode()
