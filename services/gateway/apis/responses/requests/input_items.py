"""The input items of a request to ``/v1/responses``, checked one by one."""

import msgspec
from msgspec import Raw

from services.gateway.apis.responses.requests.schema import ContentPart, Item
from services.gateway.chat.media import NO_MEDIA, Media
from services.gateway.chat.requests.json_body import json_errors
from services.gateway.chat.requests.json_list import PartCount, is_text, items, typed
from services.gateway.chat.requests.schema import MAX_MESSAGES
from services.gateway.chat.requests.unsupported import unsupported
from services.gateway.http.violations import show
from shared.errors import InvalidRequest
from shared.text.long_json import MAX_VALUES, decode_text

ROLES = ("user", "assistant", "system", "developer")
REFERENCE = "item_reference"
REQUIRED: dict[str, tuple[str, ...]] = {
    "message": ("role", "content"),
    "reasoning": (),
    "function_call": ("call_id", "name", "arguments"),
    "function_call_output": ("call_id", "output"),
    "custom_tool_call": ("call_id", "name", "input"),
    "custom_tool_call_output": ("call_id", "output"),
    REFERENCE: ("id",),
}
"""The required fields of an item of each type."""

ID_PREFIXES = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
}

INPUT_IMAGE = "input_image"
HOLDERS = {
    "message": "content",
    "function_call_output": "output",
    "custom_tool_call_output": "output",
}
"""The fields of items that may hold images."""

TEXT_PARTS = ("input_text", "output_text", "text", "refusal", "reasoning_text", "summary_text")


class _Head(msgspec.Struct):
    type: str
    id: str | None = None


def read_input(raw: Raw, media: Media = NO_MEDIA) -> list[bytes]:
    """The JSON of each item of ``input``, with its type; images are not read yet. Raises
    InvalidRequest."""
    if is_text(raw):
        return [_user_message(_text(raw))]
    parts = PartCount("input")

    def take(index: int, item: Raw) -> bytes:
        return _checked(item, f"input[{index}]", parts, INPUT_IMAGE in media.kinds)

    return items(raw, "input", MAX_MESSAGES, take, max_values=MAX_VALUES)


def _user_message(text: str) -> bytes:
    content = [{"type": "input_text", "text": text}]
    return msgspec.json.encode({"type": "message", "role": "user", "content": content})


@json_errors()
def _text(raw: Raw) -> str:
    text = decode_text(memoryview(raw))
    if not text:
        raise InvalidRequest('input is ""; expected str of length >= 1', param="input")
    return text


def _checked(raw: Raw, param: str, parts: PartCount, takes_images: bool) -> bytes:
    item: Item = typed(raw, Item, param)
    kind = item.type or ("message" if item.role is not None else REFERENCE)
    if kind not in REQUIRED:
        raise unsupported(f"{param}.type", kind, " or ".join(map(show, REQUIRED)))
    for name in REQUIRED[kind]:
        if getattr(item, name) is None:
            raise InvalidRequest(f"{param}.{name} is required", param=f"{param}.{name}")
    if kind == "message" and item.role not in ROLES:
        raise InvalidRequest(
            f"{param}.role is {show(item.role)}; expected one of {', '.join(ROLES)}",
            param=f"{param}.role",
        )
    for name in ("content", "output", "summary"):
        more = (INPUT_IMAGE,) if takes_images and HOLDERS.get(kind) == name else ()
        _check_parts(getattr(item, name), f"{param}.{name}", parts, more)
    fields = msgspec.json.decode(raw, type=dict[str, Raw])
    return msgspec.json.encode({**fields, "type": kind})


def _check_parts(
    found: str | list[ContentPart] | None, param: str, parts: PartCount, more: tuple[str, ...]
) -> None:
    """``more`` are types of parts that are no texts."""
    if not isinstance(found, list):
        return
    parts.add(len(found))
    for number, part in enumerate(found):
        where = f"{param}[{number}]"
        if part.type in more:
            continue
        if part.type not in TEXT_PARTS:
            raise unsupported(f"{where}.type", part.type, show("input_text"))
        if part.text is None and part.refusal is None:
            raise InvalidRequest(f"{where}.text is required", param=f"{where}.text")


def references(items: list[bytes]) -> dict[int, str]:
    """The ids of the items given only by reference, by their places."""
    heads = (msgspec.json.decode(item, type=_Head) for item in items)
    return {index: head.id or "" for index, head in enumerate(heads) if head.type == REFERENCE}


def kept_input(items: list[bytes], key: str) -> bytes:
    """The JSON array of the items with their known fields, each with an id; ``key`` makes new ids
    unique."""
    kept = [msgspec.json.decode(item, type=Item) for item in items]
    for number, item in enumerate(kept):
        if item.id is None:
            item.id = f"{ID_PREFIXES[item.type or '']}_{key}i{number:03x}"
    return msgspec.json.encode(kept)
