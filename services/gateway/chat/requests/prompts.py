"""A client's texts and ids as Prompts for the mesh."""

import re

import msgspec
import numpy as np
from msgspec import Raw

from services.gateway.chat.requests.json_body import json_errors, plain
from services.gateway.chat.requests.json_list import is_list, is_text, items
from services.gateway.chat.requests.schema import Content, InputMessage
from services.gateway.chat.requests.token_ids import read_ids
from services.gateway.http.violations import show, violation
from services.gateway.mesh.job import Prompt
from shared.errors import InvalidRequest
from shared.text.long_json import decode_text
from shared.wire.codec import Array
from shared.wire.messages import ModelInfo

_TEXTS = re.compile(rb'\[\s*"')
_IDS = re.compile(rb'\[\s*[^\s\["{\]]')


def completion_prompts(
    raw: Raw,
    model: ModelInfo,
    max_prompts: int,
    is_cut: bool = False,
    field: str = "prompt",
    setting: str = "max-choices = ",
) -> list[Prompt]:
    """Reads a text, a list of ids, or a list of several of either kind, from ``field``. Ids may
    exceed the context if the prompt ``is_cut``. ``setting`` names the limit."""
    if is_text(raw):
        return [text_prompt(raw, field)]
    if is_one_prompt(raw):
        return [ids_prompt(raw, model, field, is_cut)]
    is_kind = is_text if _TEXTS.match(raw) else is_list

    def take(number: int, value: Raw) -> Prompt:
        param = f"{field}[{number}]"
        if not is_kind(value):
            raise InvalidRequest(
                f"{param} is {show(plain(value))}; expected a text, or a list of ids, as all others"
                " are",
                param=param,
            )
        return text_prompt(value, param) if is_text(value) else _ids(value, model, param, is_cut)

    return items(raw, field, max_prompts, take, setting)


def is_one_prompt(raw: Raw) -> bool:
    """Whether a text or a list of ids, and no list of several."""
    return is_text(raw) or _IDS.match(raw) is not None


@json_errors()
def text_prompt(raw: Raw, param: str = "prompt") -> Prompt:
    try:
        text = decode_text(memoryview(raw))
    except msgspec.ValidationError as error:
        raise violation(error, param, plain(raw)) from None
    if not text:
        raise InvalidRequest(f'{param} is ""; expected str of length >= 1', param=param)
    return Prompt("text", _bytes(text.encode()))


def ids_prompt(raw: Raw, model: ModelInfo, param: str, is_cut: bool = False) -> Prompt:
    """``param`` is the field of the ids."""
    return Prompt("ids", read_ids(raw, model, param, is_cut))


def _ids(raw: Raw, model: ModelInfo, param: str, is_cut: bool) -> Prompt:
    prompt = ids_prompt(raw, model, param, is_cut)
    if not len(prompt.data):
        raise InvalidRequest(f"{param} is []; expected array of length >= 1", param=param)
    return prompt


@json_errors()
def final_assistant_text(messages: Prompt) -> str:
    """The text of the last message if it is the assistant's."""
    *_, last = msgspec.json.decode(messages.data.tobytes(), type=list[Raw])
    message = msgspec.json.decode(last, type=InputMessage)
    if message.role != "assistant":
        return ""
    content: Content = msgspec.json.decode(message.content, type=Content)
    if isinstance(content, list):
        return "".join(part.text or part.refusal or "" for part in content)
    return content or message.refusal or ""


def _bytes(text: bytes) -> Array:
    return np.frombuffer(text, dtype=np.uint8)
