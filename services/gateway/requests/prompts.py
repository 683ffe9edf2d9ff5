"""What clients give as a prompt, as Prompts for the mesh."""

import re
from typing import Any

import msgspec
import numpy as np
from msgspec import Raw

from services.gateway.requests.job import Prompt
from services.gateway.requests.json_body import items, json_errors, plain
from services.gateway.requests.schema import MAX_MESSAGES, ContentPart, InputMessage, TokenId
from services.gateway.requests.token_ids import check_length, known_ids, read_ids
from services.gateway.requests.unsupported import unsupported
from services.gateway.requests.violations import show, violation
from shared.codec import Array
from shared.errors import InvalidRequest
from shared.messages import ModelInfo

ROLES = ("system", "developer", "user", "assistant", "tool", "function")

_TEXT = re.compile(rb'"')
_IDS = re.compile(rb'\[\s*[^\s\["{\]]')


def chat_prompt(messages: Raw) -> Prompt:
    """The messages as the client sent them."""
    encoded = items(messages, "messages", MAX_MESSAGES, _encoded)
    return Prompt("chat", _bytes(b"[%b]" % b",".join(encoded)))


def completion_prompts(
    raw: Raw,
    model: ModelInfo,
    max_prompts: int,
    is_cut: bool = False,
    field: str = "prompt",
    setting: str = "max-choices = ",
) -> list[Prompt]:
    """Reads a text, a list of ids, or a list of several of either kind, which came as ``field``.
    Ids may be more than the context holds if the prompt ``is_cut``. ``setting`` names the limit."""
    if _TEXT.match(raw):
        return [text_prompt(raw, field)]
    if _IDS.match(raw):
        return [ids_prompt(raw, model, field, is_cut)]
    kinds: list[type] = []

    def take(number: int, value: Any) -> Prompt:
        param = f"{field}[{number}]"
        kinds.append(type(value))
        if kinds[0] not in (str, list) or kinds[0] is not kinds[-1]:
            raise InvalidRequest(
                f"{param} is {show(value)}; expected a text, or a list of ids, as all others are",
                param=param,
            )
        return _text(value, param) if kinds[0] is str else _ids(value, model, param, is_cut)

    return items(raw, field, max_prompts, take, setting)


@json_errors()
def text_prompt(raw: Raw, param: str = "prompt") -> Prompt:
    try:
        return _text(msgspec.json.decode(raw, type=str), param)
    except msgspec.ValidationError as error:
        raise violation(error, param, plain(raw)) from None


def ids_prompt(raw: Raw, model: ModelInfo, param: str, is_cut: bool = False) -> Prompt:
    """``param`` is where they come from."""
    return Prompt("ids", read_ids(raw, model, param, is_cut))


def _text(text: str, param: str) -> Prompt:
    if not text:
        raise InvalidRequest(f'{param} is ""; expected str of length >= 1', param=param)
    return Prompt("text", _bytes(text.encode()))


def _ids(values: list[Any], model: ModelInfo, param: str, is_cut: bool) -> Prompt:
    if not values:
        raise InvalidRequest(f"{param} is []; expected array of length >= 1", param=param)
    if not is_cut:
        check_length(len(values), model, param)
    try:
        ids = msgspec.convert(values, list[TokenId])
    except msgspec.ValidationError as error:
        raise violation(error, param, values) from None
    return Prompt("ids", known_ids(ids, model.vocab_size, param))


def final_assistant_text(messages: Prompt) -> str:
    """The text of the last message if it is the assistant's."""
    *_, last = msgspec.json.decode(messages.data.tobytes(), type=list[Raw])
    message = msgspec.json.decode(last, type=InputMessage)
    if message.role != "assistant":
        return ""
    if isinstance(message.content, list):
        return "".join(part.text or part.refusal or "" for part in message.content)
    return message.content or message.refusal or ""


def _encoded(index: int, fields: Any) -> bytes:
    """One message."""
    param = f"messages[{index}]"
    try:
        message = msgspec.convert(fields, InputMessage)
    except msgspec.ValidationError as error:
        raise violation(error, param, fields) from None
    if message.role not in ROLES:
        raise InvalidRequest(
            f"{param}.role is {show(message.role)}; expected one of {', '.join(ROLES)}",
            param=f"{param}.role",
        )
    _check_content(message, f"{param}.content")
    for number, call in enumerate(message.tool_calls or ()):
        if call.function is None and call.custom is None:
            field = f"{param}.tool_calls[{number}].function"
            raise InvalidRequest(f"{field} is required", param=field)
    return msgspec.json.encode(fields)


def _check_content(message: InputMessage, param: str) -> None:
    has_others = message.tool_calls or message.function_call or message.reasoning
    has_others = has_others or message.reasoning_content or message.refusal
    if message.content is None and not has_others:
        raise InvalidRequest(f"{param} is required", param=param)
    if isinstance(message.content, list):
        for number, part in enumerate(message.content):
            _check_part(part, f"{param}[{number}]")


def _check_part(part: ContentPart, param: str) -> None:
    if part.type not in ("text", "refusal"):
        raise unsupported(f"{param}.type", part.type, show("text"))
    if getattr(part, part.type) is None:
        field = f"{param}.{part.type}"
        raise InvalidRequest(f"{field} is required", param=field)


def _bytes(text: bytes) -> Array:
    return np.frombuffer(text, dtype=np.uint8)
